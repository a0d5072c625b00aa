"""python -m notebooks.page: write notebooks/pool.html and pool.svg, the picture in README.md."""

from notebooks.page.build import build

for path in build():
    print(f"{path.name}  {path.stat().st_size / 1024:.0f} KB")
