// Curves and lanes over one axis of time. Only the lanes in sight are drawn, so 1,000 workers cost what 30 do.

import { byId, clock, draw, duration, make, number, put, whole } from "./format.js";
import { STATES } from "./story.js";

// A stretch's height says its state as well as its colour does.
const HEIGHTS = { computing: 1, serving: 1, slow: 1, recovering: 1, joining: 0.55, paused: 0.45, spare: 0.25, dead: 0.25 };
const CHART_HEIGHT = 84;
const SEEN_BEYOND = 6; // lanes drawn above and below what is in sight
const MANY = 40; // marks, which then stand back behind the curve
const MARK_NAMES = { failure: "failure", evicted: "eviction", corruption: "corruption", distrusted: "distrust" };

export class Timeline {
  constructor(story) {
    this.story = story;
    this.metric = "";
    this.at = null; // the time under the pointer
    this.picked = null; // {lane, stretch} chosen with the keyboard
    this.lanes = byId("lanes");
    this.rate = this.#chart(byId("throughput-chart"));
    this.loss = this.#chart(byId("metric-chart"));
    this.laneSvg = draw("svg", { role: "img", "aria-hidden": "true" });
    this.lanes.append(this.laneSvg);
    this.axis = draw("svg", { height: 20 });
    byId("axis").append(this.axis);
    this.#legend();
    this.#listen();
  }

  #chart(box) {
    const svg = draw("svg", { height: CHART_HEIGHT, role: "img" });
    box.append(svg);
    return { box, svg };
  }

  #legend() {
    for (const state of STATES.filter((one) => HEIGHTS[one])) {
      const key = make("i", { class: `key c-${state}` });
      key.style.height = `${Math.round(12 * HEIGHTS[state])}px`;
      const entry = make("li", {}, key, state);
      if (state === "serving") entry.id = "legend-serving";
      byId("legend").append(entry);
    }
    const saved = make("i", { class: "key c-checkpointing" });
    saved.style.height = "5px";
    saved.style.width = "5px";
    byId("legend").append(make("li", {}, saved, "checkpoint"));
  }

  #listen() {
    let waiting = false;
    const later = () => {
      if (waiting) return;
      waiting = true;
      requestAnimationFrame(() => { waiting = false; this.render(); });
    };
    this.later = later;
    let scrolling = false; // the curves stay as they are
    this.lanes.addEventListener("scroll", () => {
      if (scrolling) return;
      scrolling = true;
      requestAnimationFrame(() => { scrolling = false; this.#lanes(this.#scale()); });
    }, { passive: true });
    new ResizeObserver(later).observe(this.lanes);
    for (const [svg, what] of [[this.rate.svg, "chart"], [this.loss.svg, "chart"], [this.laneSvg, "lanes"]]) {
      svg.addEventListener("pointermove", (event) => this.#point(event, svg, what));
      svg.addEventListener("pointerleave", () => { this.at = null; tip(null); later(); });
    }
    this.lanes.addEventListener("keydown", (event) => this.#key(event));
    this.lanes.addEventListener("blur", () => { this.picked = null; tip(null); later(); });
    byId("metric").addEventListener("change", (event) => { this.metric = event.target.value; later(); });
  }

  // -- where things are ------------------------------------------------------------------------------------

  get gutter() {
    return parseFloat(getComputedStyle(document.documentElement).getPropertyValue("--gutter")) || 60;
  }

  #scale() {
    const { from, until } = this.story;
    const left = this.gutter, right = Math.max(left + 10, this.lanes.clientWidth - 8);
    return {
      left, right, from, until,
      x: (at) => left + ((Math.min(Math.max(at, from), until) - from) / (until - from)) * (right - left),
      time: (x) => from + ((x - left) / (right - left)) * (until - from),
    };
  }

  get row() {
    const lanes = this.story.lanes.length;
    return lanes <= 12 ? 24 : lanes <= 40 ? 18 : 14;
  }

  #stretches(lane) {
    const { until } = this.story;
    return lane.stretches.map(([at, state, worker], index) => ({
      at, state: STATES[state], worker, end: lane.stretches[index + 1]?.[0] ?? Math.max(until, at),
    }));
  }

  // -- drawing ---------------------------------------------------------------------------------------------

  render() {
    const { story } = this;
    const begun = story.lanes.length > 0;
    const served = story.lanes.some((lane) => lane.group !== "workers");
    byId("timeline-empty").hidden = begun;
    byId("legend-serving").hidden = !served;
    put("lanes-title", served ? "Workers, servers and slices" : "Workers");
    for (const part of [this.rate.box, this.loss.box, this.lanes, byId("axis")]) part.hidden = !begun;
    document.querySelector(".lanes-head").hidden = !begun;
    if (!begun) return;
    const scale = this.#scale();
    this.#metrics();
    this.#curve(this.rate, story.series.samples_per_s ?? [], scale, "Throughput", true);
    this.#curve(this.loss, story.series[this.metric] ?? [], scale, this.metric, false);
    this.#lanes(scale);
    this.#axis(scale);
  }

  #metrics() {
    const names = Object.keys(this.story.series).filter((name) => name !== "samples_per_s").sort();
    if (!names.includes(this.metric)) this.metric = names.includes("loss") ? "loss" : names[0] ?? "";
    const select = byId("metric");
    if (select.options.length !== names.length || names.some((name, i) => select.options[i].value !== name)) {
      select.replaceChildren(...names.map((name) => make("option", { value: name }, name)));
    }
    if (select.value !== this.metric) select.value = this.metric;
    select.hidden = names.length < 2;
    byId("metric-name").hidden = names.length >= 2;
    put("metric-name", this.metric ? this.metric[0].toUpperCase() + this.metric.slice(1) : "No metric recorded");
  }

  #curve({ svg }, points, scale, name, fromZero) {
    const top = 10, bottom = CHART_HEIGHT - 4;
    const parts = [];
    let [low, high] = [Infinity, -Infinity];
    for (const point of points) {
      if (point[3] < low) low = point[3];
      if (point[4] > high) high = point[4];
    }
    if (!points.length) [low, high] = [0, 1];
    if (fromZero) low = Math.min(0, low);
    if (high <= low) [low, high] = [low - Math.abs(low) * 0.1 - 0.5, high + Math.abs(high) * 0.1 + 0.5];
    const ticks = nice(low, high, 4);
    low = Math.min(low, ticks[0]);
    const y = (value) => bottom - ((value - low) / (high - low)) * (bottom - top);
    for (const value of ticks) {
      parts.push(draw("line", { class: "grid-line", x1: scale.left, x2: scale.right, y1: y(value), y2: y(value) }));
      parts.push(draw("text", { class: "tick", x: scale.left - 8, y: y(value) + 4, "text-anchor": "end" }, tick(value)));
    }
    if (points.length) {
      for (const part of unbroken(points)) {
        const xs = part.map((point) => scale.x(point[0]).toFixed(1));
        const upper = part.map((point, i) => `${xs[i]},${y(point[4]).toFixed(1)}`);
        const lower = part.map((point, i) => `${xs[i]},${y(point[3]).toFixed(1)}`).reverse();
        if (part.some((point) => point[4] > point[3])) parts.push(draw("path", { class: "area", d: `M${upper.join("L")}L${lower.join("L")}Z` }));
        const line = part.map((point, i) => `${xs[i]},${y(point[2]).toFixed(1)}`);
        parts.push(draw("path", { class: "curve", d: `M${line.join("L")}${line.length === 1 ? "h.1" : ""}` }));
      }
    }
    this.#marks(parts, scale, top - 6, bottom);
    if (this.at !== null) {
      const near = closest(points, this.at);
      parts.push(draw("line", { class: "cursor", x1: scale.x(this.at), x2: scale.x(this.at), y1: top, y2: bottom }));
      if (near) parts.push(draw("circle", { class: "dot", r: 3.5, cx: scale.x(near[0]), cy: y(near[2]) }));
    }
    const last = points[points.length - 1];
    svg.setAttribute("aria-label", last ? `${name}: ${number(last[2])} now, from ${number(low)} to ${number(high)}` : name);
    svg.replaceChildren(...parts);
  }

  #marks(parts, scale, top, bottom) {
    const lines = {}, heads = {};
    for (const mark of this.story.marks) { // one path for all of a kind: there may be hundreds
      const x = Math.round(scale.x(mark.t)) + 0.5;
      (lines[mark.kind] ??= []).push(`M${x},${top + 5}V${bottom}`);
      (heads[mark.kind] ??= []).push(`M${x - 4},${top}h8l-4,6z`);
    }
    for (const kind of Object.keys(lines)) {
      const other = MARK_NAMES[kind] ? "" : " other";
      const many = lines[kind].length > MANY ? " many" : "";
      parts.push(draw("path", { class: `mark${other}${many}`, d: lines[kind].join(""), "data-kind": kind }));
      parts.push(draw("path", { class: `mark-head${other}`, d: heads[kind].join("") }));
    }
    const saved = this.story.checkpoints.map((one) => `M${(scale.x(one.t) - 2).toFixed(1)},${bottom - 2}h4v4h-4z`);
    if (saved.length) parts.push(draw("path", { class: "saved-tick", d: saved.join("") }));
  }

  #lanes(scale) {
    const { lanes } = this.story;
    const { row } = this;
    const height = lanes.length * row;
    const first = Math.max(0, Math.floor(this.lanes.scrollTop / row) - SEEN_BEYOND);
    const end = Math.min(lanes.length, Math.ceil((this.lanes.scrollTop + this.lanes.clientHeight) / row) + SEEN_BEYOND);
    const shapes = {};
    const parts = [];
    const thick = row - (row > 16 ? 8 : 4);
    for (let index = first; index < (end || lanes.length); index += 1) {
      const lane = lanes[index];
      const middle = index * row + row / 2;
      parts.push(draw("text", { class: "lane-name", x: scale.left - 8, y: middle + 4, "text-anchor": "end", "data-group": lane.group }, trimmed(shortened(lane), scale.left)));
      if (index && lane.group !== lanes[index - 1].group) {
        parts.push(draw("line", { class: "grid-line", x1: 0, x2: scale.right, y1: index * row, y2: index * row }));
      }
      for (const { at, state, end: until } of this.#stretches(lane)) {
        const size = HEIGHTS[state];
        if (!size || until < scale.from) continue;
        const x = scale.x(at), width = Math.max(1, scale.x(until) - x), h = Math.max(2, thick * size);
        (shapes[state] ??= []).push(`M${x.toFixed(1)},${(middle - h / 2).toFixed(1)}h${width.toFixed(1)}v${h}h-${width.toFixed(1)}z`);
      }
    }
    for (const state of STATES) { // the rare ones last: they must not be covered
      if (shapes[state]) parts.push(draw("path", { class: `s-${state}`, d: shapes[state].join(""), "data-state": state }));
    }
    parts.push(...this.#changes(scale, lanes.slice(first, end || lanes.length), first, thick));
    if (this.at !== null) parts.push(draw("line", { class: "cursor", x1: scale.x(this.at), x2: scale.x(this.at), y1: 0, y2: height }));
    if (this.picked) parts.push(this.#outline(scale, row, thick));
    this.laneSvg.setAttribute("height", height);
    this.laneSvg.setAttribute("data-first", first);
    this.laneSvg.replaceChildren(...parts);
  }

  // Where a slice got another primary there is a gap in its lane, which is as wide on any screen.
  #changes(scale, lanes, first, thick) {
    const gaps = [];
    lanes.forEach((lane, index) => {
      if (lane.group !== "slices") return;
      for (const [at] of lane.stretches.slice(1)) {
        gaps.push(`M${(scale.x(at) - 1).toFixed(1)},${(first + index) * this.row + (this.row - thick) / 2}h2v${thick}h-2z`);
      }
    });
    return gaps.length ? [draw("path", { class: "handed", d: gaps.join("") })] : [];
  }

  #outline(scale, row, thick) {
    const stretch = this.#stretches(this.story.lanes[this.picked.lane])[this.picked.stretch];
    const x = scale.x(stretch.at);
    return draw("rect", { class: "picked", x, y: this.picked.lane * row + (row - thick) / 2 - 1.5, width: Math.max(3, scale.x(stretch.end) - x), height: thick + 3, rx: 2 });
  }

  #axis(scale) {
    const span = scale.until - scale.from;
    const parts = [];
    const most = Math.max(2, Math.floor((scale.right - scale.left) / 90));
    for (const value of timeTicks(span, most)) {
      const x = scale.x(scale.from + value);
      const anchor = x > scale.right - 24 ? "end" : value === 0 ? "start" : "middle";
      parts.push(draw("text", { class: "tick", x, y: 14, "text-anchor": anchor }, value === 0 ? clock(scale.from) : `+${since(value)}`));
    }
    this.axis.replaceChildren(...parts);
  }

  // -- pointing --------------------------------------------------------------------------------------------

  #point(event, svg, what) {
    const scale = this.#scale();
    const box = svg.getBoundingClientRect();
    const x = event.clientX - box.left;
    if (x < scale.left - 4 || x > scale.right + 4) { this.at = null; tip(null); this.later(); return; }
    this.at = scale.time(Math.min(Math.max(x, scale.left), scale.right));
    const lines = what === "lanes" ? this.#laneTip(event.clientY - box.top) : this.#chartTip(scale);
    tip(lines, event.clientX, event.clientY);
    this.later();
  }

  #laneTip(y) {
    const lane = this.story.lanes[Math.floor(y / this.row)];
    const stretch = lane && this.#stretches(lane).filter((one) => one.at <= this.at).pop();
    if (!stretch || stretch.state === "gone") return [lane?.name ?? "", "nobody"];
    return this.#stretchLines(stretch);
  }

  #stretchLines({ worker, state, at, end }) {
    return [`${worker} · ${state}`, `${clock(at)} to ${clock(end)}, ${duration(end - at)}`];
  }

  #chartTip(scale) {
    const lines = [clock(this.at)];
    const rate = closest(this.story.series.samples_per_s ?? [], this.at);
    const loss = closest(this.story.series[this.metric] ?? [], this.at);
    if (loss) lines.push(`${this.metric} ${number(loss[2])}${spread(loss)} · step ${whole.format(loss[1])}`);
    if (rate) lines.push(`${number(rate[2])} samples/s${spread(rate)}`);
    const near = (scale.until - scale.from) * 6 / (scale.right - scale.left);
    for (const mark of this.story.marks.filter((one) => Math.abs(one.t - this.at) <= near).slice(-4)) {
      lines.push(`${mark.text}${mark.count > 1 ? ` and ${mark.count - 1} more around` : ""}`);
    }
    return lines;
  }

  #key(event) {
    const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    const move = moves[event.key];
    if (event.key === "Escape") { this.picked = null; tip(null); this.later(); }
    const { lanes } = this.story;
    if (!move || !lanes.length) return;
    event.preventDefault();
    const before = this.picked ?? { lane: 0, stretch: Infinity };
    const lane = Math.min(Math.max(before.lane + (this.picked ? move[0] : 0), 0), lanes.length - 1);
    const stretches = this.#stretches(lanes[lane]);
    const wanted = move[0] ? Infinity : before.stretch + move[1];
    this.picked = { lane, stretch: Math.min(Math.max(wanted, 0), stretches.length - 1) };
    const chosen = stretches[this.picked.stretch];
    const top = lane * this.row;
    if (top < this.lanes.scrollTop) this.lanes.scrollTop = top;
    if (top + this.row > this.lanes.scrollTop + this.lanes.clientHeight) this.lanes.scrollTop = top + this.row - this.lanes.clientHeight;
    const box = this.laneSvg.getBoundingClientRect();
    const lines = this.#stretchLines(chosen);
    tip(lines, box.left + this.#scale().x(chosen.at), box.top + top + this.row);
    put("spoken", lines.join(", "));
    this.later();
  }
}

export function tip(lines, x = 0, y = 0) {
  const node = byId("tip");
  node.hidden = !lines;
  if (!lines) return;
  node.replaceChildren(...lines.map((line, index) => make("div", {}, index ? line : make("b", {}, line))));
  const { width, height } = node.getBoundingClientRect();
  node.style.left = `${Math.max(8, Math.min(x + 14, innerWidth - width - 8))}px`;
  node.style.top = `${y + 18 + height > innerHeight ? y - height - 12 : y + 18}px`;
}

function closest(points, at) {
  let low = 0, high = points.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (points[middle][0] <= at) low = middle; else high = middle - 1;
  }
  return points[low];
}

// Where nothing was told for long there is no line: it would show what never was.
function unbroken(points) {
  const gaps = points.slice(1).map((point, i) => point[0] - points[i][0]).sort((a, b) => a - b);
  const longest = Math.max(2, (gaps[gaps.length >> 1] ?? 0) * 6);
  const parts = [[points[0]]];
  for (let i = 1; i < points.length; i += 1) {
    if (points[i][0] - points[i - 1][0] > longest) parts.push([]);
    parts.at(-1).push(points[i]);
  }
  return parts;
}

function spread(point) {
  return point[4] > point[3] ? ` (${number(point[3])} to ${number(point[4])})` : "";
}

function tick(value) {
  if (Math.abs(value) >= 1e6) return `${Number((value / 1e6).toPrecision(3))} M`;
  if (Math.abs(value) >= 1e4) return `${Number((value / 1e3).toPrecision(3))} k`;
  return number(value);
}

function nice(low, high, most) {
  const rough = (high - low) / most;
  const base = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((times) => times * base).find((size) => size >= rough);
  const ticks = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-6; value += step) ticks.push(Number(value.toPrecision(12)));
  return ticks.length ? ticks : [low];
}

function timeTicks(span, most) {
  const sizes = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400];
  const step = sizes.find((size) => span / size <= most) ?? Math.ceil(span / most / 86400) * 86400;
  const ticks = [];
  for (let value = 0; value <= span; value += step) ticks.push(value);
  return ticks;
}

function since(seconds) {
  const two = (value) => String(Math.round(value)).padStart(2, "0");
  if (seconds < 60) return `${seconds} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)}:${two(seconds % 60)}`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)}:${two((seconds % 3600) / 60)} h`;
  return `${Math.floor(seconds / 86400)} d ${Math.round((seconds % 86400) / 3600)} h`;
}

// A slice's kind is clear from where it stands: the parameters' have their number.
function shortened(lane) {
  return lane.group === "slices" ? lane.name.replace(/^parameters\//, "slice ") : lane.name;
}

function trimmed(name, gutter) {
  const most = Math.max(4, Math.floor((gutter - 8) / 6.5));
  return name.length <= most ? name : `${name.slice(0, most - 1)}…`;
}
