"""Pages and pictures that need no network: the templates of ``pages/``; ``base.html`` is what the pages share."""

from typing import Any

from thalweg.utils.formatting import format_bytes, format_seconds


def render_page(template: str, **values: Any) -> str:
    """Fill in a template of ``pages/``; what it shows of ``values`` is escaped."""
    import jinja2  # torch requires it; whoever draws no page need not load it

    options: dict[str, Any] = {"autoescape": True, "undefined": jinja2.StrictUndefined}
    loader = jinja2.PackageLoader("thalweg.observe", "pages")
    pages = jinja2.Environment(loader=loader, trim_blocks=True, lstrip_blocks=True, **options)
    pages.filters.update(bytes=format_bytes, seconds=format_seconds)
    return pages.get_template(template).render(values)
