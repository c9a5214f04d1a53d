"""Write docs/gallery.md and its pictures: what each kind of position encoding does."""

from __future__ import annotations

from pathlib import Path

from rope_extend.plots.gallery import draw_gallery, page

DOCS = Path(__file__).parent.parent / "docs"

if __name__ == "__main__":
    draw_gallery(DOCS / "gallery", overwrite=True)
    (DOCS / "gallery.md").write_text(page("gallery"), encoding="utf-8")
