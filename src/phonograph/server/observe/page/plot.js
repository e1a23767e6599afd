// Small line plots over time as SVG: no library, nothing but numbers in.

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 84;
const TOP = 6;
const BOTTOM = 16;

function element(name, attributes, parent) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (parent) parent.append(made);
  return made;
}

/** A round number that is not below the value, and not far above. */
export function niceCeiling(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  for (const step of [1, 1.5, 2, 3, 4, 5, 6, 8]) {
    if (value <= step * power * 1.0000001) return step * power;
  }
  return 10 * power;
}

const OUTLIER = 4;
const USUAL = 0.9;

/**
 * Where a linear axis ends: at the highest value, unless a few of them are far above all others. Those are then cut
 * off, and marked: one burst must not press ten minutes into a flat line.
 */
export function linearTop(values) {
  const sorted = values.filter((value) => value > 0).sort((one, other) => one - other);
  const highest = sorted.at(-1) ?? 0;
  const usual = sorted[Math.floor(USUAL * (sorted.length - 1))] ?? 0;
  return niceCeiling(highest > OUTLIER * usual ? 1.5 * usual : highest);
}

/** Powers of ten around all values: what differs by a thousand is seen on one axis. */
export function logRange(values) {
  const known = values.filter((value) => value > 0);
  if (!known.length) return [0.1, 1];
  const low = 10 ** Math.floor(Math.log10(Math.min(...known)) + 1e-9);
  return [low, Math.max(low * 10, 10 ** Math.ceil(Math.log10(Math.max(...known)) - 1e-9))];
}

/** A path through the values; where one is missing the line ends, and one that stands alone is a dot. */
function linePath(values, x, y) {
  let path = "";
  let drawing = false;
  for (let index = 0; index < values.length; index++) {
    if (values[index] === null) {
      drawing = false;
      continue;
    }
    const point = `${x(index).toFixed(1)} ${y(values[index]).toFixed(1)}`;
    if (drawing) path += `L${point}`;
    else path += values[index + 1] == null ? `M${point}h.01` : `M${point}`;
    drawing = true;
  }
  return path;
}

function areaPath(values, x, y) {
  let path = "";
  let start = null;
  for (let index = 0; index <= values.length; index++) {
    const missing = index === values.length || values[index] === null;
    if (!missing && start === null) {
      start = index;
      path += `M${x(index).toFixed(1)} ${y(0).toFixed(1)}`;
    }
    if (!missing) path += `L${x(index).toFixed(1)} ${y(values[index]).toFixed(1)}`;
    if (missing && start !== null) {
      path += `L${x(index - 1).toFixed(1)} ${y(0).toFixed(1)}Z`;
      start = null;
    }
  }
  return path;
}

/**
 * A plot of some series over the same seconds. `series` is a list of {key, label, area}; the classes
 * `series-0`, `series-1` … give the colours. `format` turns a value into text.
 * With `log` the axis is logarithmic.
 */
export class Plot {
  constructor(holder, { title, series, format, span, ceiling, log }) {
    this.title = title;
    this.series = series;
    this.format = format;
    this.span = span;
    this.ceiling = ceiling;
    this.log = log;
    this.samples = [];
    this.pointed = null;
    this.figure = document.createElement("figure");
    this.figure.className = "plot";
    this.svg = element("svg", { role: "img", height: HEIGHT }, this.figure);
    this.grid = element("g", { class: "grid" }, this.svg);
    this.shapes = element("g", {}, this.svg);
    this.cursor = element("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" }, this.svg);
    this.caption = document.createElement("figcaption");
    this.keys = series.map((one, index) => {
      const key = document.createElement("span");
      key.className = `key key-${index}`;
      this.caption.append(key);
      return key;
    });
    this.when = document.createElement("span");
    this.when.className = "when";
    this.caption.append(this.when);
    this.figure.append(this.caption);
    holder.append(this.figure);
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerdown", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", () => {
      this.pointed = null;
      this.read();
    });
    new ResizeObserver(() => this.draw()).observe(this.figure);
  }

  show(samples) {
    this.samples = samples;
    this.draw();
  }

  x(index) {
    return this.width - 1 - ((this.samples.length - 1 - index) / (this.span - 1)) * (this.width - 2);
  }

  draw() {
    this.width = Math.max(60, this.figure.clientWidth);
    this.svg.setAttribute("width", this.width);
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${HEIGHT}`);
    const columns = this.series.map(({ key }) => this.samples.map((sample) => sample[key]));
    const x = (index) => this.x(index);
    const { low, top, y } = this.axis(columns.flat());
    this.drawGrid(low, top, y);
    this.shapes.replaceChildren();
    // The first series is the one that matters most: it lies on top.
    for (let index = columns.length - 1; index >= 0; index--) {
      if (this.series[index].area) {
        element("path", { class: `area area-${index}`, d: areaPath(columns[index], x, y) }, this.shapes);
      }
      element("path", { class: `series series-${index}`, d: linePath(columns[index], x, y) }, this.shapes);
      this.markBeyond(columns[index], index, top);
    }
    this.svg.setAttribute("aria-label", this.describe(columns));
    this.read();
  }

  /** The values at its ends, and how a value becomes a height. */
  axis(values) {
    const floor = HEIGHT - BOTTOM;
    const height = (share) => floor - Math.max(0, Math.min(share, 1)) * (floor - TOP);
    if (this.log) {
      const [low, top] = logRange(values);
      return { low, top, y: (value) => height(value > 0 ? Math.log(value / low) / Math.log(top / low) : 0) };
    }
    const top = this.ceiling ?? linearTop(values);
    return { low: 0, top, y: (value) => height(value / top) };
  }

  /** A small arrow at the upper edge for each run of values that lie above it. */
  markBeyond(values, number, top) {
    for (let index = 0; index < values.length; index++) {
      if (!(values[index] > top * 1.0000001)) continue;
      let last = index;
      while (values[last + 1] > top * 1.0000001) last += 1;
      const at = Math.min(this.width - 4, Math.max(4, (this.x(index) + this.x(last)) / 2));
      const shape = `M${(at - 4).toFixed(1)} ${TOP + 1}h8l-4 -6z`;
      const highest = this.format(Math.max(...values.slice(index, last + 1)));
      const mark = element("path", { class: `beyond beyond-${number}`, d: shape }, this.shapes);
      element("title", {}, mark).textContent = `up to ${highest}`;
      index = last;
    }
  }

  drawGrid(low, top, y) {
    this.grid.replaceChildren();
    const lines = [low, top];
    if (this.log) for (let value = low * 10; value < top * 0.99; value *= 10) lines.push(value);
    else lines.push(top / 2);
    for (const value of lines) {
      element("line", { x1: 0, x2: this.width, y1: y(value), y2: y(value) }, this.grid);
    }
    if (this.log) {
      const least = element("text", { x: 2, y: y(low) - 3 }, this.grid);
      least.textContent = this.format(low);
    }
    const label = element("text", { x: 2, y: y(top) + 10 }, this.grid);
    label.textContent = this.format(top);
    const minutes = Math.round(this.span / 60);
    const from = element("text", { x: 0, y: HEIGHT - 3 }, this.grid);
    from.textContent = `${minutes} min ago`;
    const to = element("text", { x: this.width, y: HEIGHT - 3, "text-anchor": "end" }, this.grid);
    to.textContent = "now";
  }

  describe(columns) {
    const parts = this.series.map(({ label }, index) => {
      const known = columns[index].filter((value) => value !== null);
      if (!known.length) return `${label}: nothing yet`;
      return `${label}: latest ${this.format(known.at(-1))}, highest ${this.format(Math.max(...known))}`;
    });
    return `${this.title} over the last ${Math.round(this.span / 60)} minutes. ${parts.join("; ")}.`;
  }

  point(event) {
    const at = event.clientX - this.svg.getBoundingClientRect().left;
    const back = Math.round(((this.width - 1 - at) / (this.width - 2)) * (this.span - 1));
    this.pointed = Math.max(0, back);
    this.read();
  }

  /** The legend: the latest values, or those under the pointer. */
  read() {
    const index = this.samples.length - 1 - (this.pointed ?? 0);
    const sample = this.pointed === null ? null : this.samples[index];
    this.series.forEach(({ key, label }, number) => {
      const value = sample ? sample[key] : null;
      this.keys[number].textContent = sample ? `${label} ${value === null ? "–" : this.format(value)}` : label;
    });
    this.when.textContent = sample ? new Date(sample.at * 1000).toLocaleTimeString() : "";
    this.cursor.setAttribute("visibility", sample ? "visible" : "hidden");
    if (sample) {
      this.cursor.setAttribute("x1", this.x(index));
      this.cursor.setAttribute("x2", this.x(index));
    }
  }
}
