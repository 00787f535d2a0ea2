// Who computed, waited and communicated when: two lanes a worker, cut to what is seen.

const LANE_PIXELS = 17;
const GAP_PIXELS = 10;

class Timeline extends View {
  // A timeline: {label, workers: [{rank, spans: {name: [start, length, step, ...]}}], low, high, first, last}
  constructor(figure, timelines, meanings, colours) {
    super(figure, "timeline", { left: 76, right: 12, top: 10, bottom: 44 });
    Object.assign(this, { timelines, meanings, colours });
    this.choose = figure.querySelector("[data-role=run]");
    this.choose.addEventListener("change", () => this.rebuild());
    this.rebuild();
  }

  get chosen() { return this.timelines[this.choose.value]; }

  rebuild() {
    const { workers, low, high, label } = this.chosen;
    this.canvas.style.height = `${this.margins.top + this.margins.bottom + workers.length * (2 * LANE_PIXELS + GAP_PIXELS)}px`;
    [this.low, this.high] = [low, high];
    const said = this.chosen.shares.map(s => `worker ${s.rank} computed ${plain(s.compute_seconds)} s and waited ${plain(s.wait_seconds)} s for communication`);
    this.canvas.setAttribute("aria-label", `Timeline of ${label}: ${said.join("; ")}.`);
    this.redraw();
  }

  extent() { return [this.chosen.first, this.chosen.last]; }

  // The spans of one list that are seen. Lists are sorted by start; longest: how far back one may reach.
  each(list, act) {
    if (list.longest === undefined) {
      list.longest = 0;
      for (let i = 1; i < list.length; i += 3) list.longest = Math.max(list.longest, list[i]);
    }
    for (let i = 3 * lowerBound(list.length / 3, this.low - list.longest, k => list[3 * k]); i < list.length && list[i] <= this.high; i += 3) {
      if (list[i] + list[i + 1] >= this.low) act(list[i], list[i + 1], list[i + 2]);
    }
  }

  lane(worker, name) {
    const top = this.plot.y + worker * (2 * LANE_PIXELS + GAP_PIXELS);
    return name === "communicate" ? top + LANE_PIXELS + 1 : top;
  }

  paint(context) {
    const wide = this.high - this.low;
    const isShort = wide < 2, count = this.plot.width / 90;
    const ticks = isShort ? ticksBetween(0, wide, count).map(tick => tick + this.low) : ticksBetween(this.low, this.high, count);
    const title = isShort ? `milliseconds after second ${plain(this.low, 7)} of the run` : "seconds of the run";
    this.drawAxis(context, ticks, tick => isShort ? plain(1e3 * (tick - this.low), 6) : plain(tick, 6), title);
    const { x, y, width, height } = this.plot;
    this.numDrawn = 0;
    this.chosen.workers.forEach((worker, number) => {
      context.fillStyle = colourOf("--ink");
      context.textAlign = "right";
      context.textBaseline = "middle";
      context.fillText(`worker ${worker.rank}`, x - 8, this.lane(number, "compute") + LANE_PIXELS);
      context.save();
      context.beginPath();
      context.rect(x, y, width, height);
      context.clip();
      for (const [name, list] of Object.entries(worker.spans)) {
        context.fillStyle = this.colours[name];
        const top = this.lane(number, name);
        let drawnTo = -1;
        this.each(list, (start, length) => {
          const left = this.toPixel(start), right = this.toPixel(start + length);
          // What is narrower than a pixel is drawn once a pixel, so that nothing vanishes and nothing is drawn twice.
          const end = Math.max(right - (right - left > 3 ? 0.6 : 0), left + 1);
          if (end <= drawnTo) return;
          this.numDrawn++;
          context.fillRect(Math.max(left, drawnTo), top, end - Math.max(left, drawnTo), LANE_PIXELS - 1);
          if (name === "wait" && right - left > 5) this.hatch(context, left, top, right - left);
          drawnTo = Math.ceil(end) - (right - left > 3 ? 1 : 0);
        });
      }
      context.restore();
    });
  }

  hatch(context, left, top, width) {
    context.strokeStyle = "#ffffff";
    context.globalAlpha = 0.7;
    context.lineWidth = 1;
    context.save();
    context.beginPath();
    context.rect(left, top, width, LANE_PIXELS - 1);
    context.clip();
    context.beginPath();
    const from = Math.max(left, this.plot.x), to = Math.min(left + width, this.plot.x + this.plot.width);
    for (let x = from - LANE_PIXELS; x < to; x += 5) { context.moveTo(x, top + LANE_PIXELS); context.lineTo(x + LANE_PIXELS, top); }
    context.stroke();
    context.restore();
    context.globalAlpha = 1;
  }

  hover(x, y) {
    const { workers } = this.chosen, at = this.toAxis(x);
    if (x < this.plot.x) return null;
    let found = null;
    workers.forEach((worker, number) => {
      // Later names lie on top: a wait is inside its step.
      for (const [name, list] of Object.entries(worker.spans)) {
        const top = this.lane(number, name);
        if (y < top || y > top + LANE_PIXELS) continue;
        this.each(list, (start, length, step) => {
          if (start <= at && at <= start + length) found = `worker ${worker.rank}, step ${step}\n${this.meanings[name]}, ${plain(1e3 * length)} ms`;
        });
      }
    });
    return found;
  }
}
