"use strict";
// A canvas with an x axis that zooms and moves: by wheel, drag, fingers, keys and buttons. Charts and timelines draw in it.

const element = (name, properties = {}, ...children) => {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key === "class") made.className = value;
    else if (key in made) made[key] = value;
    else made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
};

const colourOf = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const isDark = () => getComputedStyle(document.documentElement).colorScheme === "dark";
const live = text => { document.getElementById("live").textContent = text; };

// Steps of 1, 2 or 5 times a power of ten between two values.
const ticksBetween = (low, high, count) => {
  if (!(high > low)) return [low];
  const rough = (high - low) / Math.max(count, 1);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map(f => f * power).find(s => s >= rough) ?? 10 * power;
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(i * step);
  return found;
};

const plain = (value, digits = 4) => {
  if (!Number.isFinite(value)) return "-";
  const text = Number(value.toPrecision(digits)).toString();
  return text.includes("e") ? value.toExponential(1) : text;
};

// The first index at which values[index] >= x, in a sorted list.
const lowerBound = (length, x, at) => {
  let low = 0, high = length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (at(middle) < x) low = middle + 1; else high = middle;
  }
  return low;
};

const ZOOM_STEP = 1.35;
const CLICK_PIXELS = 5;

class View {
  constructor(figure, name, margins) {
    this.figure = figure;
    this.name = name;
    this.margins = margins;
    this.canvas = element("canvas", { tabIndex: 0, role: "application" });
    this.canvas.setAttribute("aria-roledescription", "interactive figure");
    this.canvas.setAttribute("aria-describedby", "keys");
    this.tip = element("div", { class: "tip", hidden: true });
    const stage = element("div", { class: "stage" }, this.canvas, this.tip);
    let bar = figure.querySelector(".bar");
    if (!bar) { bar = element("div", { class: "bar" }); figure.append(bar); }
    const tools = element("div", { class: "tools", role: "group", ariaLabel: `Zoom of: ${name}` });
    for (const [text, label, act] of [
      ["+", "zoom in", () => this.zoom(1 / ZOOM_STEP)],
      ["−", "zoom out", () => this.zoom(ZOOM_STEP)],
      ["←", "move left", () => this.move(-0.2)],
      ["→", "move right", () => this.move(0.2)],
      ["whole", "show the whole", () => this.reset()],
    ]) {
      const button = element("button", { type: "button", textContent: text, onclick: act });
      button.setAttribute("aria-label", `${label}: ${name}`);
      button.dataset.act = label;
      tools.append(button);
    }
    bar.append(tools);
    figure.append(stage);
    this.pointers = new Map();
    this.selection = null;
    this.measure();
    this.listen();
    new ResizeObserver(() => this.redraw()).observe(stage);
  }

  // ---- what a figure must provide: extent() -> [low, high] in axis units, paint(context), hover(x, y) -> text or null

  // Asking the canvas for its size may lay the page out anew, so it is asked once a drawing, not once a point.
  measure() {
    const { left, right, top, bottom } = this.margins;
    this.size = { width: this.canvas.clientWidth, height: this.canvas.clientHeight };
    const { width, height } = this.size;
    this.plot = { x: left, y: top, width: Math.max(width - left - right, 10), height: Math.max(height - top - bottom, 10) };
  }

  toPixel(x) { return this.plot.x + (x - this.low) / (this.high - this.low) * this.plot.width; }
  toAxis(pixel) { return this.low + (pixel - this.plot.x) / this.plot.width * (this.high - this.low); }

  reset() {
    [this.low, this.high] = this.extent();
    this.redraw();
  }

  show(low, high) {
    const [first, last] = this.extent();
    const width = Math.min(Math.max(high - low, (last - first) * 1e-5), last - first);
    this.low = Math.min(Math.max(low, first), last - width);
    this.high = this.low + width;
    this.redraw();
  }

  zoom(factor, about = (this.low + this.high) / 2) {
    this.show(about - (about - this.low) * factor, about + (this.high - about) * factor);
  }

  move(share) {
    const by = share * (this.high - this.low);
    this.show(this.low + by, this.high + by);
  }

  redraw() {
    if (this.pending) return;
    this.pending = true;
    requestAnimationFrame(() => { this.pending = false; this.draw(); });
  }

  draw() {
    this.measure();
    const ratio = window.devicePixelRatio || 1;
    const { width, height } = this.size;
    if (!width) return;
    if (this.canvas.width !== Math.round(width * ratio) || this.canvas.height !== Math.round(height * ratio)) {
      this.canvas.width = Math.round(width * ratio);
      this.canvas.height = Math.round(height * ratio);
    }
    const context = this.canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    context.font = "12px system-ui, sans-serif";
    this.paint(context);
    if (this.selection) {
      const [a, b] = this.selection;
      context.globalAlpha = 0.2;
      context.fillStyle = colourOf("--accent");
      context.fillRect(Math.min(a, b), this.plot.y, Math.abs(b - a), this.plot.height);
      context.globalAlpha = 1;
    }
  }

  // ---- input

  listen() {
    const canvas = this.canvas;
    const place = event => {
      const box = canvas.getBoundingClientRect();
      return { x: event.clientX - box.left, y: event.clientY - box.top };
    };
    canvas.addEventListener("wheel", event => {
      if (document.activeElement !== canvas && !event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      this.zoom(event.deltaY > 0 ? ZOOM_STEP : 1 / ZOOM_STEP, this.toAxis(place(event).x));
    }, { passive: false });
    canvas.addEventListener("pointerdown", event => {
      canvas.setPointerCapture?.(event.pointerId);
      const at = place(event);
      this.pointers.set(event.pointerId, { ...at, start: at.x, touch: event.pointerType === "touch", shift: event.shiftKey });
    });
    canvas.addEventListener("pointermove", event => {
      const at = place(event), pointer = this.pointers.get(event.pointerId);
      if (!pointer) { this.point(at.x, at.y); return; }
      const before = pointer.x;
      if (this.pointers.size === 2) {
        const other = [...this.pointers.entries()].find(([id]) => id !== event.pointerId)[1];
        const was = Math.abs(before - other.x), now = Math.abs(at.x - other.x);
        if (was > 10 && now > 10) this.zoom(was / now, this.toAxis((at.x + other.x) / 2));
      } else if (pointer.touch || pointer.shift) {
        const by = (before - at.x) / this.plot.width * (this.high - this.low);
        this.show(this.low + by, this.high + by);
      } else {
        this.selection = [pointer.start, at.x];
        this.redraw();
      }
      pointer.x = at.x;
    });
    const end = event => {
      const pointer = this.pointers.get(event.pointerId);
      this.pointers.delete(event.pointerId);
      const selection = this.selection;
      this.selection = null;
      if (!pointer) return;
      if (event.type === "pointerup" && selection && Math.abs(selection[1] - selection[0]) > CLICK_PIXELS) {
        const ends = selection.map(pixel => this.toAxis(pixel)).sort((a, b) => a - b);
        this.show(...ends);
      } else {
        this.redraw();
        this.point(pointer.x, pointer.y);
      }
    };
    canvas.addEventListener("pointerup", end);
    canvas.addEventListener("pointercancel", end);
    canvas.addEventListener("pointerleave", () => { this.tip.hidden = true; this.point(-1, -1); });
    canvas.addEventListener("dblclick", () => this.reset());
    canvas.addEventListener("keydown", event => {
      const act = this.keys()[event.key];
      if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      act();
    });
  }

  keys() {
    return {
      "+": () => this.zoom(1 / ZOOM_STEP), "=": () => this.zoom(1 / ZOOM_STEP), "-": () => this.zoom(ZOOM_STEP),
      ArrowLeft: () => this.move(-0.2), ArrowRight: () => this.move(0.2), 0: () => this.reset(), Home: () => this.reset(),
    };
  }

  point(x, y) {
    const text = this.hover(x, y);
    this.tip.hidden = !text;
    if (!text) return;
    this.tip.textContent = text;
    const { width } = this.size, own = this.tip.offsetWidth;
    this.tip.style.left = `${Math.max(0, Math.min(x + 14, width - own))}px`;
    this.tip.style.top = `${y > 90 ? y - this.tip.offsetHeight - 12 : y + 18}px`;
  }

  drawAxis(context, ticks, show, title) {
    const { x, y, width, height } = this.plot;
    context.strokeStyle = colourOf("--rule");
    context.fillStyle = colourOf("--quiet");
    context.lineWidth = 1;
    context.textAlign = "center";
    context.textBaseline = "top";
    for (const tick of ticks) {
      const pixel = Math.round(this.toPixel(tick)) + 0.5;
      context.beginPath();
      context.moveTo(pixel, y);
      context.lineTo(pixel, y + height + 4);
      context.stroke();
      context.fillText(show(tick), pixel, y + height + 7);
    }
    context.fillStyle = colourOf("--ink");
    context.fillText(title, x + width / 2, y + height + 24);
  }
}
