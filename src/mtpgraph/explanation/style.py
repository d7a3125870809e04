"""How the page looks: narrow and wide, light and dark; system fonts, nothing from elsewhere."""

STYLE = """\
.mtpgraph-explain {
  --ink: #1c2024; --quiet: #5d6670; --paper: #fbfbfa; --card: #ffffff; --line: #e1e3e6;
  --ours: #0b5cad; --ours-bg: #e3effb; --writes: #8a4b00; --writes-bg: #fdf0dd;
  --good: #16703a; --good-bg: #e2f4e8; --bad: #b3261e; --bad-bg: #fdecea; --bar: #9cc3ec;
  --mono: ui-monospace, SFMono-Regular, Menlo, Consolas, "Liberation Mono", monospace;
  color-scheme: light dark; color: var(--ink); background: var(--paper);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
  box-sizing: border-box; max-width: 100%; min-height: 100vh; padding: 20px 16px 48px;
}
@media (prefers-color-scheme: dark) {
  .mtpgraph-explain {
    --ink: #e6e8ea; --quiet: #9aa3ad; --paper: #15181b; --card: #1d2125; --line: #32383e;
    --ours: #8cc4ff; --ours-bg: #17324f; --writes: #f2be7b; --writes-bg: #45300f;
    --good: #7fd6a0; --good-bg: #15371f; --bad: #ff9d94; --bad-bg: #4a1d1a; --bar: #3d6c9e;
  }
}
.mtpgraph-explain *, .mtpgraph-explain *::before { box-sizing: border-box; }
.mtpgraph-explain > header, .mtpgraph-explain > section { max-width: 1080px; margin: 0 auto; }
.mtpgraph-explain > section { margin-top: 36px; }
.mtpgraph-explain h1 {
  margin: 0 0 8px; font: 600 22px/1.3 var(--mono); overflow-wrap: anywhere; color: inherit;
}
.mtpgraph-explain h2 { margin: 0 0 8px; font-size: 18px; line-height: 1.3; color: inherit; }
.mtpgraph-explain p { margin: 0 0 8px; }
.mtpgraph-explain .quiet { color: var(--quiet); font-size: 13.5px; }
.mtpgraph-explain .verdict {
  display: inline-block; margin: 0 0 14px; padding: 5px 12px; border-radius: 8px; font-weight: 600;
}
.mtpgraph-explain .verdict.good { color: var(--good); background: var(--good-bg); }
.mtpgraph-explain .verdict.bad { color: var(--bad); background: var(--bad-bg); }
.mtpgraph-explain .tiles {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(104px, 1fr)); gap: 8px;
  margin: 0 0 10px;
}
.mtpgraph-explain .tile {
  padding: 8px 12px; border: 1px solid var(--line); border-radius: 8px; background: var(--card);
}
.mtpgraph-explain .tile b {
  display: block; font-size: 20px; line-height: 1.3; white-space: nowrap;
}
.mtpgraph-explain .tile span { color: var(--quiet); font-size: 12.5px; }
.mtpgraph-explain .tile.bad b { color: var(--bad); }
.mtpgraph-explain .card {
  margin: 0 0 8px; padding: 10px 14px; border: 1px solid var(--line); border-radius: 8px;
  background: var(--card);
}
.mtpgraph-explain .card.bad { border-left: 4px solid var(--bad); }
.mtpgraph-explain .card p:last-child { margin-bottom: 0; }
.mtpgraph-explain .card ul { margin: 6px 0 0; padding-left: 20px; font-size: 14px; }
.mtpgraph-explain .where { font-size: 13.5px; overflow-wrap: anywhere; }
.mtpgraph-explain .remedy::before { content: "Instead: "; font-weight: 600; }
.mtpgraph-explain .remedy { color: var(--good); }
.mtpgraph-explain code, .mtpgraph-explain pre {
  font: 13px/1.5 var(--mono); color: inherit; background: none; padding: 0; border: 0;
}
.mtpgraph-explain pre {
  margin: 0 0 8px; padding: 8px 10px; overflow-x: auto; border-radius: 6px;
  background: var(--paper); border: 1px solid var(--line);
}
.mtpgraph-explain .chip {
  display: inline-block; padding: 1px 8px; border-radius: 10px; font-size: 12px; font-weight: 600;
  color: var(--quiet); background: var(--paper); border: 1px solid var(--line);
}
.mtpgraph-explain .chip.good { color: var(--good); background: var(--good-bg); }
.mtpgraph-explain .card.bad .chip { color: var(--bad); background: var(--bad-bg); }
.mtpgraph-explain .lines { margin: 0; padding: 0; list-style: none; }
.mtpgraph-explain .lines li { margin: 0; padding: 0; border-top: 1px solid var(--line); }
.mtpgraph-explain .lines li.file {
  padding: 10px 0 3px; color: var(--quiet); font: 12.5px/1.4 var(--mono); overflow-wrap: anywhere;
}
.mtpgraph-explain .lines .lines {
  margin: 0 0 6px 10px; padding-left: 10px; border-left: 2px solid var(--line);
}
.mtpgraph-explain summary { cursor: pointer; list-style: none; }
.mtpgraph-explain summary::-webkit-details-marker { display: none; }
.mtpgraph-explain summary > .row > .no::before { content: "\\25b8\\00a0"; color: var(--quiet); }
.mtpgraph-explain details[open] > summary > .row > .no::before { content: "\\25be\\00a0"; }
.mtpgraph-explain summary:focus-visible { outline: 2px solid var(--ours); border-radius: 4px; }
.mtpgraph-explain section > details > summary {
  padding: 6px 0; color: var(--quiet); font-size: 13.5px;
}
.mtpgraph-explain section > details > summary::before { content: "\\25b8\\00a0"; }
.mtpgraph-explain section > details[open] > summary::before { content: "\\25be\\00a0"; }
.mtpgraph-explain .row { display: flex; gap: 10px; padding: 5px 0; align-items: baseline; }
.mtpgraph-explain .no {
  flex: 0 0 46px; text-align: right; color: var(--quiet); font: 12.5px/1.5 var(--mono);
}
.mtpgraph-explain .what { flex: 1 1 auto; min-width: 0; overflow-wrap: anywhere; }
.mtpgraph-explain .what > code { display: block; white-space: pre-wrap; }
.mtpgraph-explain .what > .quiet { display: block; }
.mtpgraph-explain .ops {
  display: flex; flex-wrap: wrap; align-items: center; gap: 4px; margin-top: 3px;
}
.mtpgraph-explain .ops:empty { display: none; }
.mtpgraph-explain .op {
  padding: 0 6px; border-radius: 4px; font: 12px/1.6 var(--mono); color: var(--quiet);
  background: color-mix(in srgb, var(--line) 55%, transparent); overflow-wrap: anywhere;
}
.mtpgraph-explain .op.ours { color: var(--ours); background: var(--ours-bg); font-weight: 600; }
.mtpgraph-explain .op.writes { color: var(--writes); background: var(--writes-bg); }
.mtpgraph-explain .op.writes::before { content: "writes\\00a0"; opacity: 0.75; }
.mtpgraph-explain .bytes {
  flex: 0 0 128px; text-align: right; font-size: 12.5px; color: var(--quiet);
  font-variant-numeric: tabular-nums;
}
.mtpgraph-explain .bytes i {
  display: block; height: 4px; min-width: 1px; margin: 3px 0 0 auto; border-radius: 2px;
  background: var(--bar);
}
.mtpgraph-explain table { width: 100%; border-collapse: collapse; font-size: 14px; }
.mtpgraph-explain th {
  padding: 4px 10px 4px 0; text-align: left; color: var(--quiet); font-weight: 500;
}
.mtpgraph-explain td {
  padding: 5px 10px 5px 0; border-top: 1px solid var(--line); text-align: left;
  vertical-align: top; overflow-wrap: anywhere;
}
.mtpgraph-explain td:first-child { font: 13px/1.6 var(--mono); }
@media (max-width: 620px) {
  .mtpgraph-explain { padding: 16px 12px 40px; }
  .mtpgraph-explain h1 { font-size: 18px; }
  .mtpgraph-explain .tile { padding: 6px 10px; }
  .mtpgraph-explain .tile b { font-size: 17px; }
  .mtpgraph-explain .row { flex-wrap: wrap; gap: 2px 8px; }
  .mtpgraph-explain .no { flex-basis: 34px; }
  .mtpgraph-explain .what { flex: 1 1 0; min-width: calc(100% - 50px); }
  .mtpgraph-explain .bytes { flex: 1 1 100%; padding-left: 42px; text-align: left; }
  .mtpgraph-explain .bytes i { margin-left: 0; }
  .mtpgraph-explain .lines .lines { margin-left: 2px; padding-left: 6px; }
  .mtpgraph-explain thead { display: none; }
  .mtpgraph-explain table, .mtpgraph-explain tbody, .mtpgraph-explain tr, .mtpgraph-explain td {
    display: block;
  }
  .mtpgraph-explain tr { padding: 6px 0; border-top: 1px solid var(--line); }
  .mtpgraph-explain td { padding: 0; border: 0; }
  .mtpgraph-explain td:empty { display: none; }
  .mtpgraph-explain td:not(:first-child)::before {
    content: attr(data-of) "\\00a0\\00a0"; color: var(--quiet); font-size: 12.5px;
  }
}
"""
