// Curves: one thin line per run, a bold mean per group, thinned to what the pixels can show.

const AXES = {
  seconds: { index: 1, title: "training time (s)", show: plain, before: "after ", unit: " s" },
  epoch: { index: 0, title: "epoch", show: plain, before: "epoch ", unit: "" },
  bytes: { index: 2, title: "sent by one worker (MB)", show: plain, before: "after ", unit: " MB" },
  workers: { index: 0, title: "number of workers", show: plain, before: "", unit: " workers" },
};
const HOVER_PIXELS = 40;
const ON_DARK = { "#000000": "#f2f2f2", "#0072b2": "#5aa9e6" };
const shade = colour => (isDark() && ON_DARK[colour]) || colour;

class Chart extends View {
  // ys: {name: {points: run => [[epoch, seconds, megabytes, y], ...], title, show}}
  constructor(figure, name, groups, ys, { target = null, axis = null } = {}) {
    super(figure, name, { left: 58, right: 14, top: 12, bottom: 44 });
    Object.assign(this, { groups, ys, target, fixedAxis: axis, showSeeds: true, current: null });
    const select = role => figure.querySelector(`[data-role=${role}]`);
    this.choose = { x: select("x"), y: select("y"), log: select("log") };
    for (const control of Object.values(this.choose)) control?.addEventListener("change", () => this.rebuild());
    this.rebuild();
  }

  get axis() { return this.fixedAxis ?? AXES[this.choose.x.value]; }
  get isLog() { return this.choose.log?.checked ?? false; }
  get y() { return this.ys[this.choose.y ? this.choose.y.value : Object.keys(this.ys)[0]]; }

  // The series that are shown: {label, colour, dash, bold, xs, ys}; xs sorted, in axis units (logarithms, if asked for).
  rebuild() {
    const toAxis = this.isLog ? Math.log10 : x => x;
    const make = (points, rest) => {
      const kept = points.filter(p => Number.isFinite(p[3]) && Number.isFinite(p[this.axis.index]) && (!this.isLog || p[this.axis.index] > 0));
      return { ...rest, xs: kept.map(p => toAxis(p[this.axis.index])), ys: kept.map(p => p[3]) };
    };
    this.series = [];
    for (const group of this.groups) {
      const runs = group.runs.filter(run => run.shown);
      if (!runs.length) continue;
      const all = runs.map(run => this.y.points(run));
      const shared = Math.min(...all.map(points => points.length));
      const mean = Array.from({ length: shared }, (_, i) => [0, 1, 2, 3].map(k => all.reduce((sum, p) => sum + p[i][k], 0) / all.length));
      if (runs.length > 1 && this.showSeeds) {
        runs.forEach((run, i) => this.series.push(make(all[i], { label: run.name, group, bold: false })));
      }
      const label = runs.length > 1 ? `${group.label}, mean of ${runs.length}` : runs[0].name;
      this.series.push(make(runs.length > 1 ? mean : all[0], { label, group, bold: true }));
    }
    this.current = null;
    this.reset();
    this.describe();
  }

  describe() {
    const said = this.series.filter(s => s.bold && s.ys.length).map(s => `${s.label} ends at ${this.y.show(s.ys.at(-1))}`);
    this.canvas.setAttribute("aria-label", `${this.name}: ${this.y.title} against ${this.axis.title}. ${said.join("; ") || "Nothing is shown"}.`);
  }

  extent() {
    let low = Infinity, high = -Infinity;
    for (const { xs } of this.series ?? []) if (xs.length) { low = Math.min(low, xs[0]); high = Math.max(high, xs.at(-1)); }
    if (!(high >= low)) return [0, 1];
    if (!this.isLog) low = Math.min(low, 0);
    return high > low ? [low, high] : [low - 0.5, high + 0.5];
  }

  // The part of a series that is seen, and one point beyond at either side.
  visible({ xs }) {
    const first = Math.max(lowerBound(xs.length, this.low, i => xs[i]) - 1, 0);
    return [first, Math.min(lowerBound(xs.length, this.high, i => xs[i]) + 1, xs.length)];
  }

  paint(context) {
    let bottom = Infinity, top = -Infinity;
    for (const series of this.series) {
      const [first, last] = this.visible(series);
      for (let i = first; i < last; i++) { bottom = Math.min(bottom, series.ys[i]); top = Math.max(top, series.ys[i]); }
    }
    if (!(top >= bottom)) [bottom, top] = [0, 1];
    const room = (top - bottom || Math.abs(top) || 1) * 0.06;
    this.bottom = bottom - room;
    this.top = top + room;
    const { x, y, width, height } = this.plot;
    this.drawAxis(context, this.ticks(), tick => this.axis.show(this.isLog ? 10 ** tick : tick), this.axis.title);
    context.textAlign = "right";
    context.textBaseline = "middle";
    for (const tick of ticksBetween(this.bottom, this.top, height / 45)) {
      const pixel = Math.round(this.yPixel(tick)) + 0.5;
      context.strokeStyle = colourOf("--rule");
      context.beginPath();
      context.moveTo(x, pixel);
      context.lineTo(x + width, pixel);
      context.stroke();
      context.fillStyle = colourOf("--quiet");
      context.fillText(this.y.show(tick), x - 6, pixel);
    }
    context.save();
    context.beginPath();
    context.rect(x, y - 4, width + 5, height + 8);
    context.clip();
    this.drawTarget(context);
    this.numDrawn = 0;
    for (const series of this.series) this.drawSeries(context, series);
    if (this.current) {
      const { series, index } = this.current;
      context.beginPath();
      context.arc(this.toPixel(series.xs[index]), this.yPixel(series.ys[index]), 6, 0, 7);
      context.lineWidth = 2;
      context.setLineDash([]);
      context.strokeStyle = colourOf("--ink");
      context.stroke();
    }
    context.restore();
  }

  yPixel(value) { return this.plot.y + (this.top - value) / (this.top - this.bottom) * this.plot.height; }

  ticks() {
    if (!this.isLog) return ticksBetween(this.low, this.high, this.plot.width / 90);
    const found = [];
    for (let power = Math.floor(this.low); power <= this.high; power++) {
      for (const digit of this.high - this.low < 2.5 ? [1, 2, 5] : [1]) found.push(power + Math.log10(digit));
    }
    const seen = found.filter(t => t >= this.low && t <= this.high);
    return seen.length > 1 ? seen : ticksBetween(10 ** this.low, 10 ** this.high, 5).filter(v => v > 0).map(Math.log10);
  }

  drawTarget(context) {
    if (this.target === null || this.target < this.bottom || this.target > this.top) return;
    const { x, width } = this.plot, pixel = this.yPixel(this.target);
    context.setLineDash([2, 3]);
    context.strokeStyle = context.fillStyle = colourOf("--quiet");
    context.beginPath();
    context.moveTo(x, pixel);
    context.lineTo(x + width, pixel);
    context.stroke();
    context.textAlign = "left";
    context.textBaseline = "bottom";
    context.fillText(`target ${this.y.show(this.target)}`, x + 4, pixel - 2);
  }

  drawSeries(context, series) {
    const [first, last] = this.visible(series);
    const { colour, dash } = series.group;
    context.strokeStyle = context.fillStyle = shade(colour);
    context.lineJoin = "bevel";
    context.globalAlpha = series.bold ? 1 : 0.45;
    context.beginPath();
    // At most four points for a column of pixels: its first, lowest, highest and last.
    let before = null, length = 0;
    const add = i => {
      const x = this.toPixel(series.xs[i]), y = this.yPixel(series.ys[i]);
      if (before) length += Math.hypot(x - before[0], y - before[1]);
      before = [x, y];
      this.numDrawn++;
      context.lineTo(x, y);
    };
    const dense = last - first > this.plot.width;
    for (let i = first; i < last;) {
      let end = i + 1, low = i, high = i;
      if (dense) {
        const column = Math.floor(this.toPixel(series.xs[i]));
        while (end < last && Math.floor(this.toPixel(series.xs[end])) === column) {
          if (series.ys[end] < series.ys[low]) low = end;
          if (series.ys[end] > series.ys[high]) high = end;
          end++;
        }
      }
      for (const index of new Set([i, Math.min(low, high), Math.max(low, high), end - 1])) add(index);
      i = end;
    }
    // Dashes of a curve that goes up and down many times are not seen as dashes, but take long to draw.
    const isPlain = !dense && length < 3 * (this.plot.width + this.plot.height);
    context.lineWidth = series.bold && isPlain ? 2 : 1;
    context.setLineDash(series.bold && isPlain ? dash : []);
    context.stroke();
    context.setLineDash([]);
    if (series.bold && last - first < this.plot.width / 8) {
      for (let i = first; i < last; i++) {
        context.beginPath();
        context.arc(this.toPixel(series.xs[i]), this.yPixel(series.ys[i]), 3, 0, 7);
        context.fill();
      }
    }
    context.globalAlpha = 1;
  }

  hover(x, y) {
    const before = this.current;
    this.current = null;
    let best = HOVER_PIXELS ** 2;
    const from = this.toAxis(x - HOVER_PIXELS), to = this.toAxis(x + HOVER_PIXELS);
    for (const series of x < 0 ? [] : this.series) {
      const start = lowerBound(series.xs.length, from, i => series.xs[i]);
      for (let index = start; index < series.xs.length && series.xs[index] <= to; index++) {
        const distance = (this.toPixel(series.xs[index]) - x) ** 2 + (this.yPixel(series.ys[index]) - y) ** 2;
        if (distance < best) { best = distance; this.current = { series, index }; }
      }
    }
    if (before?.series !== this.current?.series || before?.index !== this.current?.index) this.redraw();
    return this.current && this.said();
  }

  said() {
    const { series, index } = this.current;
    const x = this.isLog ? 10 ** series.xs[index] : series.xs[index];
    const labels = series.group.clock === "real" ? "" : ` [${series.group.clock}]`;
    return `${series.label}${series.label.includes(labels) ? "" : labels}\n${this.y.title} ${this.y.show(series.ys[index], 5)}\n` +
      `${this.axis.before}${this.axis.show(x)}${this.axis.unit}`;
  }

  keys() {
    const step = (curve, point) => () => {
      const bold = this.series.filter(s => s.bold && s.xs.length);
      if (!bold.length) return;
      let number = Math.max(bold.indexOf(this.current?.series), 0);
      let index = this.current ? this.current.index + point : 0;
      number = (number + curve + bold.length) % bold.length;
      index = Math.min(Math.max(index, 0), bold[number].xs.length - 1);
      this.current = { series: bold[number], index };
      const pixel = this.toPixel(bold[number].xs[index]);
      this.tip.hidden = false;
      this.tip.textContent = this.said();
      this.tip.style.left = `${Math.max(0, Math.min(pixel + 14, this.size.width - this.tip.offsetWidth))}px`;
      this.tip.style.top = `${Math.max(0, this.yPixel(bold[number].ys[index]) - this.tip.offsetHeight - 12)}px`;
      live(this.said());
      this.redraw();
    };
    return { ...super.keys(), ".": step(0, 1), ",": step(0, -1), ArrowUp: step(-1, 0), ArrowDown: step(1, 0) };
  }
}
