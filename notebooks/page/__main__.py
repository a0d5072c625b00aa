"""python -m notebooks.page: write notebooks/pool.html, the page that plays the pool."""

from notebooks.page.build import PAGE, build

build()
print(f"{PAGE.name}  {PAGE.stat().st_size / 1024:.0f} KB")
