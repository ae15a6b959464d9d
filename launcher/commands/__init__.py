"""One module per command of ``vlfit``; see ``launcher.cli`` for what each must have."""
