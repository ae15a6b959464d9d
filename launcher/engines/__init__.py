"""Engines: how a list of layers is trained. ZeRO (DeepSpeed), FairScale Pipe, DeepSpeed pipeline.

``launcher.engines.engine`` says what every engine offers; the training loop knows nothing more.
"""
