// The page: theme, tables that sort, which runs are shown, and the figures.

const data = JSON.parse(document.getElementById("data").textContent);

// ---- theme: automatic, light, dark

const remembered = { get: () => { try { return localStorage.getItem("cocod-theme"); } catch { return null; } },
  set: value => { try { localStorage.setItem("cocod-theme", value); } catch { /* a page from a file may not remember */ } } };
const views = [];

const setTheme = theme => {
  if (theme === "automatic") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  document.getElementById("theme").textContent = `Theme: ${theme}`;
  remembered.set(theme);
  drawLegend();
  for (const view of views) view.redraw();
};

// ---- tables

for (const table of document.querySelectorAll("table.sortable")) {
  for (const button of table.querySelectorAll("thead button")) {
    button.addEventListener("click", () => {
      const header = button.closest("th"), index = [...header.parentNode.children].indexOf(header);
      const descending = header.getAttribute("aria-sort") === "ascending";
      for (const other of header.parentNode.children) other.removeAttribute("aria-sort");
      header.setAttribute("aria-sort", descending ? "descending" : "ascending");
      const rows = [...table.tBodies[0].rows].map(row => ({ row, value: row.cells[index].dataset.value ?? "" }));
      const isNumber = rows.some(({ value }) => value !== "") && rows.every(({ value }) => value === "" || Number.isFinite(Number(value)));
      rows.sort((a, b) => {
        if (a.value === "" || b.value === "") return (a.value === "") - (b.value === "");  // what has no value comes last
        const order = isNumber ? a.value - b.value : a.value.localeCompare(b.value);
        return descending ? -order : order;
      });
      table.tBodies[0].append(...rows.map(({ row }) => row));
      live(`sorted by ${button.textContent}, ${descending ? "largest" : "smallest"} first`);
    });
  }
}

// ---- which runs are shown

for (const group of data.groups) for (const run of group.runs) run.shown = true;

const swatch = group => {
  const image = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  for (const [key, value] of Object.entries({ width: 34, height: 12, "aria-hidden": "true" })) image.setAttribute(key, value);
  const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
  for (const [key, value] of Object.entries({ x1: 1, x2: 33, y1: 6, y2: 6, stroke: shade(group.colour), "stroke-width": 3, "stroke-dasharray": group.dash.join(" ") })) line.setAttribute(key, value);
  image.append(line);
  return image;
};

const rebuild = () => { for (const view of views) if (view instanceof Chart) view.rebuild(); };

function drawLegend() {
  const others = document.getElementById("scaling_legend");
  others?.replaceChildren(...data.scaling.map(group => element("li", {}, swatch(group), group.label)));
  const list = document.getElementById("legend");
  const focused = document.activeElement?.dataset?.key;
  list.replaceChildren(...data.groups.map((group, number) => {
    const box = (key, checked, act) => {
      const made = element("input", { type: "checkbox", checked });
      made.dataset.key = key;
      made.addEventListener("change", () => { act(made.checked); drawLegend(); rebuild(); });
      return made;
    };
    const shown = group.runs.filter(run => run.shown).length;
    const whole = box(`g${number}`, shown > 0, checked => { for (const run of group.runs) run.shown = checked; });
    whole.indeterminate = shown > 0 && shown < group.runs.length;
    const count = group.runs.length > 1 ? ` (n = ${group.runs.length})` : "";
    const item = element("li", {}, element("label", {}, whole, swatch(group), `${group.label}${count}`));
    if (group.runs.length > 1) {
      item.append(element("ul", {}, ...group.runs.map((run, i) =>
        element("li", {}, element("label", {}, box(`g${number}r${i}`, run.shown, checked => { run.shown = checked; }), ` ${run.name}`)))));
    }
    return item;
  }));
  if (focused) list.querySelector(`[data-key="${focused}"]`)?.focus();
}

const showAll = shown => {
  for (const group of data.groups) for (const run of group.runs) run.shown = shown;
  drawLegend();
  rebuild();
};
document.getElementById("all").addEventListener("click", () => showAll(true));
document.getElementById("none").addEventListener("click", () => showAll(false));
document.getElementById("seeds").addEventListener("change", event => {
  for (const view of views) if (view instanceof Chart) { view.showSeeds = event.target.checked; view.rebuild(); }
});

// ---- figures

if (data.by_steps) {
  Object.assign(AXES.epoch, { title: "step", before: "step " });
  for (const option of document.querySelectorAll("[data-role=x] [value=epoch]")) option.textContent = "steps";
  document.querySelector("[data-role=y] [value=loss]").textContent = "the epoch so far, all workers";
}
const asPercent = (value, digits = 4) => `${plain(100 * value, digits)}%`;
views.push(
  new Chart(document.getElementById("accuracy"), data.metric, data.groups,
    { accuracy: { points: run => run.accuracy, title: data.metric, show: data.is_share ? asPercent : plain } }, { target: data.target }),
  new Chart(document.getElementById("loss"), "training loss", data.groups, {
    loss: { points: run => run.loss, title: "training loss", show: plain },
    step_loss: { points: run => run.step_loss, title: "loss of a step", show: plain },
  }),
);
if (data.scaling) {
  const figure = document.getElementById("scaling");
  views.push(new Chart(figure, "time speedup", data.scaling, { speedup: { points: run => run.speedup, title: "time speedup", show: plain } }, { axis: AXES.workers }));
}
if (data.timelines.length) views.push(new Timeline(document.getElementById("timeline"), data.timelines, data.meanings, data.span_colours));

document.getElementById("theme").addEventListener("click", () => {
  const order = ["automatic", "light", "dark"];
  const now = document.documentElement.dataset.theme ?? "automatic";
  setTheme(order[(order.indexOf(now) + 1) % order.length]);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { drawLegend(); for (const view of views) view.redraw(); });
const before = remembered.get();
setTheme(["light", "dark"].includes(before) ? before : "automatic");
