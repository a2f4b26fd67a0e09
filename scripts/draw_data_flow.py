"""Prints the diagram of the data flow on the page "Concepts"; `make docs` runs it."""

from __future__ import annotations

WIDTH, HEIGHT = 760, 420
FONT = "font-family='sans-serif' text-anchor='middle'"


def box(x: int, y: int, width: int, title: str, text: str, color: str) -> str:
    """Returns an SVG box with its upper left corner at (x, y), a title and one line of text."""
    middle = x + width // 2
    return "\n".join(
        (
            f"<rect x='{x}' y='{y}' width='{width}' height='62' rx='8' fill='{color}' stroke='#555'/>",
            f"<text x='{middle}' y='{y + 27}' {FONT} font-size='15' fill='#111'>{title}</text>",
            f"<text x='{middle}' y='{y + 47}' {FONT} font-size='11' fill='#333'>{text}</text>",
        )
    )


def arrow(start: tuple[int, int], end: tuple[int, int], text: str = "") -> str:
    """Returns an SVG arrow from `start` to `end`, with a label to the right of its middle."""
    x, y = (start[0] + end[0]) // 2 + 8, (start[1] + end[1]) // 2 + 4
    label = f"<text x='{x}' y='{y}' font-family='sans-serif' font-size='11' fill='#555'>{text}</text>"
    ends = f"x1='{start[0]}' y1='{start[1]}' x2='{end[0]}' y2='{end[1]}'"
    line = f"<line {ends} stroke='#555' marker-end='url(#end)'/>"
    return line + (label if text else "")


def draw() -> str:
    """Returns the SVG."""
    data, driver, rank = "#dbeafe", "#fef3c7", "#dcfce7"
    parts = [
        box(30, 20, 200, "DataFrame", "columns, types, nulls", data),
        box(280, 20, 200, "Driver", "checks settings and schema", driver),
        box(530, 20, 200, "DataFrame", "prediction, probability", data),
        box(30, 130, 200, "Parquet shards", "manifest written last", data),
        box(30, 240, 200, "Rank 0", "reads its rows of each step", rank),
        box(280, 240, 200, "Rank 1", "reads its rows of each step", rank),
        box(530, 130, 200, "Spark tasks", "predict in Arrow batches", rank),
        box(30, 340, 200, "Run directory", "checkpoints, history, weights", data),
        arrow((130, 82), (130, 130), "write_shards"),
        arrow((230, 51), (280, 51)),
        arrow((130, 192), (130, 240), "reader"),
        arrow((200, 192), (330, 240)),
        arrow((380, 82), (380, 240), "starts one barrier stage"),
        arrow((230, 262), (280, 262)),
        arrow((280, 280), (230, 280)),
        f"<text x='255' y='318' {FONT} font-size='11' fill='#555'>all-reduce</text>",
        arrow((130, 302), (130, 340), "writes"),
        "<path d='M 230 371 L 630 371 L 630 192' fill='none' stroke='#555' marker-end='url(#end)'/>",
        f"<text x='430' y='363' {FONT} font-size='11' fill='#555'>weights</text>",
        arrow((630, 130), (630, 82), "transform"),
    ]
    arrowhead = (
        "<defs><marker id='end' markerWidth='9' markerHeight='7' refX='8' refY='3.5' orient='auto'>"
        "<polygon points='0 0, 9 3.5, 0 7' fill='#555'/></marker></defs>"
    )
    title = "<title>Data flow of fit and transform</title>"
    frame = f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {HEIGHT}' role='img'>"
    ground = f"<rect width='{WIDTH}' height='{HEIGHT}' fill='white'/>"
    return "\n".join((frame, title, arrowhead, ground, *parts, "</svg>"))


if __name__ == "__main__":
    print(draw())
