"""Where workers keep their files: a folder for each process, under one path."""

from pathlib import Path

from moonshard.serving.config.keys import WorkerRole

MAX_PROCESSES = 512  # of a kind of workers, that have files under one path


def files_folders(path: Path, role: WorkerRole, number: int = MAX_PROCESSES) -> list[Path]:
    """The first folders of a kind of workers. Of one kind are those who prefill for others or for themselves, since
    they are asked for prompts.
    """
    kind = "decode" if role == "decode" else "prefill"
    return [path / f"{kind}-{index}" for index in range(number)]
