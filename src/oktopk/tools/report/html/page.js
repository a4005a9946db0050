"use strict";
// Draws the charts from the state in the page, in the colours of the page; a live page polls for updates.
(() => {
  let state = JSON.parse(document.getElementById("state").textContent);
  const places = () => [...document.querySelectorAll(".chart")];
  const drawn = new Map(); // place -> the width at which it was drawn
  const linear = new Set(); // charts whose logarithmic axis the reader has made linear
  const PAPER = { ink: "#1c1e21", grid: "#e3e6ea", surface: "#ffffff" };

  function colours() {
    const css = getComputedStyle(document.documentElement);
    return Object.fromEntries(Object.keys(PAPER).map((name) => [name, css.getPropertyValue(`--${name}`).trim()]));
  }

  // Breaks a long name at its separators, so that a narrow legend shows all of it.
  function broken(name, most) {
    const lines = [""];
    for (const part of name.split(/(?<=[:,/ -])/)) {
      if (lines.at(-1) && lines.at(-1).length + part.length > most) lines.push("");
      lines[lines.length - 1] += part;
    }
    return lines;
  }

  function dressed(id, width, { ink, grid, surface }) {
    const { data, layout } = structuredClone(state.charts[id]);
    const named = data.filter((trace) => trace.showlegend !== false);
    const most = Math.max(16, Math.floor((width - 60) / 6.8));
    let lines = 1;
    for (const trace of named) {
      const parts = broken(trace.name, most);
      lines = Math.max(lines, parts.length);
      trace.name = parts.join("<br>");
    }
    const longest = Math.max(0, ...named.flatMap((trace) => trace.name.split("<br>").map((part) => part.length)));
    const columns = Math.max(1, Math.floor((width - 20) / (44 + 6.6 * longest)));
    const legend = named.length > 1 ? 20 * lines * Math.ceil(named.length / columns) + 8 : 0;
    layout.showlegend = named.length > 1;
    layout.height = 300 + legend;
    layout.margin = { l: 56, r: 14, t: 24, b: 52 + legend, autoexpand: true };
    layout.legend = { orientation: "h", yref: "container", y: 0.005, yanchor: "bottom", x: 0, xanchor: "left",
                      xref: "container", font: { size: 11.5 }, bgcolor: "rgba(0,0,0,0)", itemsizing: "constant",
                      entrywidth: 14 + 6.6 * longest, traceorder: "normal" };
    layout.paper_bgcolor = layout.plot_bgcolor = "rgba(0,0,0,0)";
    layout.font = { color: ink, family: "system-ui, sans-serif", size: 12 };
    layout.hoverlabel = { bgcolor: surface, bordercolor: grid, font: { color: ink }, namelength: -1 };
    for (const axis of [layout.xaxis, layout.yaxis])
      Object.assign(axis, { gridcolor: grid, zerolinecolor: grid, linecolor: grid });
    if (linear.has(id)) layout.yaxis.type = "linear";
    return { data, layout };
  }

  function draw(place) {
    if (!state.charts[place.id]) return;
    if (place.clientWidth === 0) return void drawn.delete(place.id); // in a section that is closed: when it opens
    const { data, layout } = dressed(place.id, place.clientWidth, colours());
    Plotly.react(place, data, layout, { displayModeBar: false, responsive: true });
    drawn.set(place.id, place.clientWidth);
  }

  // Charts are drawn when they come near the window: a page of many runs opens at once.
  const near = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting && !drawn.has(entry.target.id)) draw(entry.target);
  }, { rootMargin: "600px" });
  places().forEach((place) => near.observe(place));
  const again = () => places().filter((place) => drawn.has(place.id)).forEach(draw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
  let waiting;
  addEventListener("resize", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => places().filter((p) => drawn.has(p.id) && drawn.get(p.id) !== p.clientWidth).forEach(draw), 150);
  });
  addEventListener("beforeprint", () => places().forEach(draw));

  // The buttons of a chart.
  function plain(text) {
    const parsed = new DOMParser().parseFromString(String(text).replaceAll("<br>", ""), "text/html");
    return parsed.documentElement.textContent;
  }

  // The rows of chart_rows() in csv_tables.py; a test compares them.
  function rows({ data, layout }) {
    const [x, y] = [layout.xaxis.title.text, layout.yaxis.title.text].map(plain);
    if (data.some((trace) => trace.orientation === "h")) {
      const head = ["series", "hidden", "row", `start of ${x}`, `length of ${x}`];
      const bars = (trace) => trace.y.map((row, i) =>
        [plain(trace.name), "pattern" in trace.marker ? "True" : "False", row, trace.base[i], trace.x[i]]);
      return [head, ...data.flatMap(bars)];
    }
    const points = (trace) => trace.x.map((at, i) => [plain(trace.name), at, trace.y[i]]);
    return [["series", x, y], ...data.flatMap(points).filter((row) => row[2] !== null)];
  }

  const quoted = (cell) => (/[",\n]/.test(cell) ? `"${String(cell).replaceAll('"', '""')}"` : String(cell));
  const csv = (table) => table.map((row) => row.map(quoted).join(",") + "\n").join("");

  function save(name, text, type) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type }));
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  }

  async function picture(id) {
    const figure = dressed(id, 720, PAPER); // for a white page, however this one looks
    figure.layout.paper_bgcolor = "#ffffff";
    figure.layout.width = 720;
    return Plotly.toImage(figure, { format: "svg", width: 720, height: figure.layout.height, imageDataOnly: true });
  }

  const actions = {
    scale(id, button) {
      linear.has(id) ? linear.delete(id) : linear.add(id);
      button.textContent = linear.has(id) ? "log" : "linear";
      draw(document.getElementById(id));
    },
    async svg(id) { save(`${id}.svg`, await picture(id), "image/svg+xml"); },
    csv(id) { save(`${id}.csv`, csv(rows(state.charts[id])), "text/csv"); },
  };
  addEventListener("click", ({ target }) => {
    const chosen = target instanceof HTMLButtonElement && actions[target.dataset.do];
    if (chosen) chosen(target.closest("figure").querySelector(".chart").id, target);
  });

  const sameNames = (one, other) => Object.keys(one).sort().join("\n") === Object.keys(other).sort().join("\n");

  // Replaces a text; what the reader has opened in it stays open.
  function replace(part, text) {
    const opened = [...part.querySelectorAll("details")].map((section) => section.open);
    part.innerHTML = text;
    [...part.querySelectorAll("details")].forEach((section, i) => { section.open = opened[i] ?? section.open; });
  }

  function take(news) {
    if (!sameNames(news.parts, state.parts) || !sameNames(news.charts, state.charts)) return location.reload();
    const before = state;
    state = news;
    for (const part of document.querySelectorAll("[data-part]")) {
      const name = part.dataset.part;
      if (news.parts[name] !== before.parts[name]) replace(part, news.parts[name]);
    }
    again();
  }

  async function ask() {
    const told = document.getElementById("live");
    try {
      const answer = await fetch("state.json?since=" + encodeURIComponent(state.version), { cache: "no-store" });
      if (!answer.ok) throw new Error(answer.statusText);
      if (answer.status === 200) take(await answer.json());
      told.textContent = "Live: follows the run.";
    } catch {
      told.textContent = "Live: the server does not answer; this is the last that was heard.";
    }
    setTimeout(ask, state.period);
  }
  if (state.version !== null) setTimeout(ask, state.period);
})();
