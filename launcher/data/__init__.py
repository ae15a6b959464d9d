"""Data: pack once, map into memory, batch by memory, resume exactly.

    sources → decode, tokenizer → pack → store → order → batches → loader
                                          │
                          verify, inspect, export, cache

Import the module of a concept (``from launcher.data.store import Store``); this package imports nothing
by itself, so that a command can import it without waiting for torch.
"""
