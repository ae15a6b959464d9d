"""Files that nobody else can change, whatever the umask of the shell or of SLURM is."""

import os


def keep_others_from_writing() -> None:
    """Take group and world write from every file that this process and its children create from now on."""
    os.umask(os.umask(0o022) | 0o022)
