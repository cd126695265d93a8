# SPDX-License-Identifier: Apache-2.0
"""How a report looks: on a light and a dark screen, on a phone, on paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sugar_utils.charts import N_COLORS

_LIGHT = {
    "paper": "#ffffff", "ink": "#1c2126", "faint": "#5d6873", "rule": "#d9dee3",
    "panel": "#f5f7f9", "link": "#0b5cad", "warn": "#8a4b00",
}  # fmt: skip
_DARK = {
    "paper": "#14181c", "ink": "#e4e8ec", "faint": "#9aa6b2", "rule": "#333c45",
    "panel": "#1d2329", "link": "#78b7f5", "warn": "#f0b35a",
}  # fmt: skip
_LIGHT_LINES = (
    "#0072b2", "#d55e00", "#008a63", "#b0508a", "#7a6a00", "#3d9bd1", "#6b4fbb", "#555555",
)  # fmt: skip
_DARK_LINES = (
    "#56b4e9", "#f58b4c", "#35c79a", "#e08bbd", "#e0cf4a", "#8ecdf0", "#b09cf0", "#b5b5b5",
)  # fmt: skip

_STYLE = """
* { box-sizing: border-box }
body { margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 74rem; background: var(--paper);
  color: var(--ink); font: 16px/1.5 system-ui, "Segoe UI", Roboto, "Helvetica Neue", sans-serif;
  -webkit-text-size-adjust: 100%; text-size-adjust: 100% }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0 0 .25rem; overflow-wrap: anywhere }
h2 { font-size: 1.3rem; line-height: 1.3; margin: 2.5rem 0 .75rem; padding-top: .75rem;
  border-top: 1px solid var(--rule); overflow-wrap: anywhere }
h3 { font-size: 1.05rem; line-height: 1.35; margin: 1.5rem 0 .5rem }
p { margin: .5rem 0; max-width: 46rem; overflow-wrap: anywhere }
.sub { color: var(--faint) }
.note { color: var(--warn) }
a { color: var(--link); text-decoration: none } a:hover { text-decoration: underline }
.scroll { overflow-x: auto; margin: .75rem 0 }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums }
th, td { padding: .3rem .9rem .3rem 0; text-align: left; vertical-align: top;
  border-bottom: 1px solid var(--rule) }
th { font-weight: 600 } thead th { color: var(--faint); white-space: nowrap }
td.number, th.number { text-align: right; white-space: nowrap }
table.pairs th { font-weight: 400; color: var(--faint); white-space: nowrap }
table.pairs td, td.path { overflow-wrap: anywhere }
td.path { min-width: 18rem }
.facts { display: grid; gap: .75rem 1rem; margin: .75rem 0;
  grid-template-columns: repeat(auto-fill, minmax(7.5rem, 1fr)) }
.facts dt { font-size: .82rem; line-height: 1.3; color: var(--faint) }
.facts dd { margin: 0; font-size: 1.1rem; font-variant-numeric: tabular-nums;
  overflow-wrap: anywhere }
details { margin: .75rem 0 }
summary { cursor: pointer; color: var(--link); padding: .2rem 0 }
.charts { display: grid; gap: 1rem; margin: .75rem 0;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)) }
figure { margin: 0 }
figcaption { font-size: .85rem; color: var(--faint); overflow-wrap: anywhere }
.chart { background: var(--panel); border-radius: 8px; padding: .75rem; max-width: 48rem }
.chart figcaption { color: var(--ink); font-weight: 600; font-size: .95rem }
.chart svg { display: block; width: 100%; height: auto; margin-top: .25rem }
.legend { display: flex; flex-wrap: wrap; gap: .1rem 1rem; list-style: none; margin: .2rem 0;
  padding: 0; font-size: .82rem }
.legend svg { display: inline-block; width: 1.4rem; height: .6rem; margin: 0 .35rem 0 0 }
.pictures { display: grid; gap: .75rem; margin: .75rem 0;
  grid-template-columns: repeat(auto-fill, minmax(max(22%, 9rem), 1fr)) }
.pictures img { display: block; width: 100%; height: auto; border-radius: 6px }
.wide { overflow-x: auto; margin: .75rem 0 }
.wide img { display: block; width: 100%; min-width: 44rem; height: auto; border-radius: 6px }
.label { font-size: 13px; fill: var(--faint) }
.grid { stroke: var(--rule); fill: none } .axis { stroke: var(--faint); fill: none }
.line { fill: none; stroke-width: 1.7; stroke-linejoin: round } .dot { stroke: none }
@media print {
  body { max-width: none; padding: 0; font-size: 11pt }
  figure, tr { break-inside: avoid } h2, h3 { break-after: avoid }
  .scroll, .wide { overflow: visible } .wide img { min-width: 0 }
  details::details-content { content-visibility: visible; height: auto }
}
"""


def page_style() -> str:
    """The style sheet of a page."""

    def variables(colors: Mapping[str, str]) -> str:
        return " ".join(f"--{name}: {value};" for name, value in colors.items())

    def palette(base: Mapping[str, str], lines: Sequence[str]) -> str:
        return variables({**base, **{f"s{k}": lines[k] for k in range(N_COLORS)}})

    classes = "".join(
        f".line.s{k} {{ stroke: var(--s{k}) }} .dot.s{k} {{ fill: var(--s{k}) }}\n"
        for k in range(N_COLORS)
    )
    # Paper is white whatever the screen is.
    return (
        f":root {{ {palette(_LIGHT, _LIGHT_LINES)} color-scheme: light dark }}\n"
        f"@media screen and (prefers-color-scheme: dark) {{ :root {{ "
        f"{palette(_DARK, _DARK_LINES)} }} }}\n{_STYLE}{classes}"
    )
