"""A model of the hub: its files, through huggingface_hub, which is imported for that alone."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MIN_SECONDS = 0.5  # before there is a progress bar


@dataclass(frozen=True)
class Repository:
    name: str  # ORG/NAME
    revision: str | None = None
    cache_dir: str | Path | None = None  # None: that of huggingface_hub, HF_HOME
    token: str | bool | None = None  # None: HF_TOKEN, or that of `hf auth login`

    @property
    def cache(self) -> Path:
        from huggingface_hub import constants

        return Path(self.cache_dir or constants.HF_HUB_CACHE)

    def snapshot(self, files: list[str]) -> Path:
        """The folder of the cache with these files, as far as the repository has them. Its name is the commit."""
        from huggingface_hub import snapshot_download
        from huggingface_hub.utils import tqdm

        bars: list[tqdm] = []

        class Bar(tqdm):
            """In a terminal only, and not for what is there at once."""

            def __init__(self, *args: Any, **options: Any) -> None:
                super().__init__(*args, **{"disable": None, "delay": MIN_SECONDS, **options})
                bars.append(self)

            def display(self, *args: Any, **options: Any) -> None:
                if time.time() - self.start_t > MIN_SECONDS:
                    super().display(*args, **options)

        folder = snapshot_download(**self._where, allow_patterns=files, tqdm_class=Bar)
        for bar in bars:
            bar.close()  # or some are shown once more when the process ends
        return Path(folder)

    def fetch_again(self, file: str) -> None:
        from huggingface_hub import hf_hub_download

        hf_hub_download(filename=file, force_download=True, **self._where)

    def files(self) -> list[str]:
        from huggingface_hub import HfApi

        return HfApi(token=self.token).list_repo_files(self.name, revision=self.revision)

    @property
    def _where(self) -> dict[str, Any]:
        return {"repo_id": self.name, "revision": self.revision, "cache_dir": self.cache_dir, "token": self.token}
