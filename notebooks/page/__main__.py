"""python -m notebooks.page: write pool.html, the page that plays the pool, and pool.svg, the picture in README.md."""

from notebooks.page.build import build

for made in build():
    print(f"{made.name}  {made.stat().st_size / 1024:.0f} KB")
