"""vlfit: plans, launches and measures vision-language training that fits in memory."""

__version__ = "0.1.0"
