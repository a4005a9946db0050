"use strict";
// Draws the charts from the state in the page, in the colours of the page; a live page polls for updates.
(() => {
  let state = JSON.parse(document.getElementById("state").textContent);
  const places = () => [...document.querySelectorAll(".chart")];
  const drawn = new Map(); // place -> the width class and version that was drawn

  function inColours(figure, width) {
    const css = getComputedStyle(document.documentElement);
    const [ink, grid, surface] = ["--ink", "--grid", "--surface"].map((name) => css.getPropertyValue(name).trim());
    const layout = structuredClone(figure.layout);
    const names = figure.data.filter((trace) => trace.showlegend !== false).map((trace) => trace.name);
    const longest = Math.max(0, ...names.map((name) => name.length));
    const columns = Math.max(1, Math.floor((width - 70) / (56 + 6.6 * longest)));
    const legend = names.length > 1 ? 20 * Math.ceil(names.length / columns) + 8 : 0;
    layout.showlegend = names.length > 1;
    layout.height = 320 + legend;
    layout.margin = { l: 56, r: 14, t: 26, b: 52 + legend, autoexpand: true };
    layout.legend = { orientation: "h", yref: "container", y: 0.005, yanchor: "bottom", x: 0, xanchor: "left",
                      xref: "container", font: { size: 11.5 }, bgcolor: "rgba(0,0,0,0)", itemsizing: "constant",
                      entrywidth: 26 + 6.6 * longest, traceorder: "normal" };
    layout.paper_bgcolor = layout.plot_bgcolor = "rgba(0,0,0,0)";
    layout.font = { color: ink, family: "system-ui, sans-serif", size: 12 };
    layout.hoverlabel = { bgcolor: surface, bordercolor: grid, font: { color: ink }, namelength: -1 };
    for (const axis of [layout.xaxis, layout.yaxis])
      Object.assign(axis, { gridcolor: grid, zerolinecolor: grid, linecolor: grid });
    return layout;
  }

  function draw(place) {
    const figure = state.charts[place.id];
    if (!figure) return;
    if (place.clientWidth === 0) return void drawn.delete(place.id); // in a section that is closed: when it opens
    const layout = inColours(figure, place.clientWidth);
    const config = { displaylogo: false, responsive: true, showSendToCloud: false, plotlyServerURL: "",
                     modeBarButtonsToRemove: ["select2d", "lasso2d"] };
    Plotly.react(place, structuredClone(figure.data), layout, config);
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

  const sameNames = (one, other) => Object.keys(one).sort().join("\n") === Object.keys(other).sort().join("\n");

  function take(news) {
    if (!sameNames(news.parts, state.parts) || !sameNames(news.charts, state.charts)) return location.reload();
    const before = state;
    state = news;
    for (const part of document.querySelectorAll("[data-part]")) {
      const name = part.dataset.part;
      if (news.parts[name] !== before.parts[name]) part.innerHTML = news.parts[name];
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
