"""``python -m launcher`` equals ``vlfit``."""

from launcher.cli import main

raise SystemExit(main())
