// Simulated federated learning while it goes on: points of accuracy in, curves and who is trusted out.

import { byId, draw, make, percent, put, whole } from "./format.js";

const RETRY_MS = 1500;
const WIDTH = 300, HEIGHT = 150, LEFT = 36, RIGHT = 6, TOP = 8, BOTTOM = 18;
const COLOURS = 8;

let about = null; // what is compared
let curves = []; // of each cell, accuracy by round
let trusted = new Map(); // of each cell, in which part of the rounds every client was
let picture = { state: "connecting", now: -1 };
let frame = 0;

function take(news) {
  if (news.cells) {
    about = news;
    curves = news.cells.map(() => []);
    trusted = new Map();
    byId("panels").replaceChildren();
    byId("legend").replaceChildren();
    byId("trusted").tBodies[0].replaceChildren();
  }
  for (const [cell, round, accuracy] of news.points) curves[cell][round - 1] = accuracy;
  for (const [cell, parts] of Object.entries(news.trusted)) trusted.set(Number(cell), parts);
  picture = news;
  if (!document.hidden) frame ||= requestAnimationFrame(render);
}

function render() {
  frame = 0;
  if (!about) return;
  header();
  about.attacks.forEach((attack, number) => panel(attack, number));
  about.aggregators.forEach((aggregator, number) => {
    if (!byId("legend").children[number]) {
      byId("legend").append(make("li", {}, make("i", { class: `key l${number % COLOURS}` }), aggregator));
    }
    about.attacks.forEach((attack) => row(aggregator, attack));
  });
}

function header() {
  const begun = curves.filter((curve) => curve.length).length;
  const pill = byId("state");
  pill.dataset.state = picture.state;
  put(pill, picture.state);
  put("words", about.words);
  put("trainings", `${whole.format(begun)} of ${whole.format(curves.length)}`);
  const now = picture.now >= 0 ? picture.now : curves.findLastIndex((curve) => curve.length);
  if (now < 0) return;
  const [aggregator, attack, seed] = about.cells[now];
  const rounds = curves[now].length;
  put("now", `${whole.format(rounds)} of ${whole.format(about.rounds)} rounds`);
  put("now-note", `${aggregator} under ${attack}, seed ${seed}`);
  put("accuracy", percent(curves[now][rounds - 1]));
  byId("privacy").hidden = about.epsilons.length === 0;
  if (about.epsilons.length) put("epsilon", about.epsilons[rounds - 1].toPrecision(3));
  document.title = `${percent(curves[now][rounds - 1])}: ${aggregator} under ${attack}`;
}

// The mean over seeds, of each round over those that have come so far.
function mean(aggregator, attack) {
  const mine = curves.filter((_, cell) => about.cells[cell][0] === aggregator && about.cells[cell][1] === attack);
  const length = Math.max(0, ...mine.map((curve) => curve.length));
  return Array.from({ length }, (_, round) => {
    const known = mine.map((curve) => curve[round]).filter((value) => value !== undefined);
    return known.reduce((sum, value) => sum + value, 0) / known.length;
  });
}

function panel(attack, number) {
  let box = byId("panels").children[number];
  if (!box) {
    box = make("div", { class: "panel" }, make("h3", {}, attack), draw("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img" }));
    byId("panels").append(box);
  }
  const svg = box.querySelector("svg");
  const x = (round) => LEFT + (WIDTH - LEFT - RIGHT) * (round / Math.max(1, about.rounds));
  const y = (value) => HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value;
  const parts = [];
  for (const tick of [0, 0.5, 1]) {
    parts.push(draw("line", { class: "grid-line", x1: LEFT, x2: WIDTH - RIGHT, y1: y(tick), y2: y(tick) }));
    parts.push(draw("text", { class: "tick", x: LEFT - 6, y: y(tick) + 4, "text-anchor": "end" }, `${100 * tick} %`));
  }
  for (const tick of new Set([0, about.rounds])) {
    parts.push(draw("text", { class: "tick", x: x(tick), y: HEIGHT - 4, "text-anchor": tick ? "end" : "start" }, String(tick)));
  }
  const said = [];
  about.aggregators.forEach((aggregator, place) => {
    const values = mean(aggregator, attack);
    if (!values.length) return;
    const points = values.map((value, round) => `${x(round + 1).toFixed(1)},${y(value).toFixed(1)}`).join(" ");
    parts.push(draw("polyline", { class: `line l${place % COLOURS} turn${Math.floor(place / COLOURS)}`, points, "data-aggregator": aggregator }));
    said.push(`${aggregator} ${percent(values.at(-1))}`);
  });
  svg.setAttribute("aria-label", `Accuracy under ${attack}: ${said.join(", ") || "not begun"}`);
  svg.replaceChildren(...parts);
}

function row(aggregator, attack) {
  const cells = about.cells.map((cell, number) => [...cell, number]).filter((cell) => cell[0] === aggregator && cell[1] === attack);
  const begun = cells.map((cell) => trusted.get(cell[3])).filter((parts) => parts?.length);
  if (!begun.length) return;
  const body = byId("trusted").tBodies[0];
  const key = `${aggregator} ${attack}`;
  let line = [...body.rows].find((one) => one.dataset.key === key);
  if (!line) {
    line = make("tr", {}, make("td", {}, aggregator), make("td", {}, attack), make("td", { class: "number" }), make("td"));
    line.dataset.key = key;
    body.append(line);
  }
  put(line.cells[2], percent(mean(aggregator, attack).at(-1)));
  const parts = begun[0].map((_, client) => begun.reduce((sum, one) => sum + one[client], 0) / begun.length);
  line.cells[3].replaceChildren(squares(parts));
}

function squares(parts) {
  const honest = about.clients - about.hostile;
  const box = make("span", { class: "clients" });
  parts.forEach((part, client) => {
    const fill = make("b");
    fill.style.height = `${Math.round(100 * part)}%`;
    const names = [client >= honest ? "hostile" : "honest", client === honest ? "first" : ""];
    const said = `client ${client}${client >= honest ? ", hostile" : ""}: trusted in ${percent(part, 0)} of the rounds`;
    box.append(make("i", { class: names.join(" ").trim(), title: said, role: "img", "aria-label": said }, fill));
  });
  return box;
}

function link(state) {
  byId("link").dataset.link = state;
  put("link", state === "reconnecting" ? "reconnecting…" : state);
}

function follow() {
  const source = new EventSource("/events");
  source.addEventListener("open", () => link("live"));
  source.addEventListener("message", (message) => {
    take(JSON.parse(message.data));
    link("live");
    if (picture.state === "finished") { source.close(); link("up to date"); }
  });
  source.addEventListener("error", () => {
    if (picture.state === "finished") return;
    link("reconnecting");
    if (source.readyState === EventSource.CLOSED) setTimeout(follow, RETRY_MS); // it was refused: the browser gives up
  });
}

document.addEventListener("visibilitychange", () => { if (!document.hidden) frame ||= requestAnimationFrame(render); });
follow();
