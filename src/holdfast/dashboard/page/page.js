// Brings everything together: the stream of server-sent events in, the panels out, and the actions where they are allowed.

import { EventList } from "./eventlist.js";
import { byId, put } from "./format.js";
import { showCheckpoints, showCrew, showHeader, showServers, showTime } from "./panels.js";
import { Story } from "./story.js";
import { Timeline } from "./timeline.js";

const RETRY_MS = 1500;
const story = new Story();
const timeline = new Timeline(story);
const list = new EventList(story);
const token = takeToken();
let waiting = new Set();
let frame = 0;

function render() {
  frame = 0;
  const changed = waiting;
  waiting = new Set();
  const any = (...names) => names.some((name) => changed.has(name));
  showHeader(story);
  if (!story.known) return;
  showTime(story);
  if (any("crew", "facts", "lanes")) showCrew(story, token && running() ? drain : null);
  if (any("checkpoints", "stored")) showCheckpoints(story);
  if (any("servers", "slices", "header")) showServers(story);
  if (any("events")) list.render();
  timeline.render();
  byId("actions").hidden = !(token && running());
  if (!performance.getEntriesByName("story").length) performance.mark("story"); // for who measures
}

function running() {
  return story.header?.state === "running" || story.header?.state === "unattended";
}

function take(picture) {
  for (const name of story.apply(picture)) waiting.add(name);
  if (document.hidden) return; // drawn when somebody looks again
  frame ||= requestAnimationFrame(render);
}

function link(state) {
  byId("link").dataset.link = state;
  const over = story.known && !running();
  put("link", state === "reconnecting" ? "reconnecting…" : over ? "up to date" : state);
}

function follow() {
  const source = new EventSource("/events");
  source.addEventListener("open", () => link("live"));
  source.addEventListener("message", (message) => {
    take(JSON.parse(message.data));
    link("live");
  });
  source.addEventListener("error", () => {
    link("reconnecting");
    if (source.readyState === EventSource.CLOSED) setTimeout(follow, RETRY_MS); // it was refused: the browser gives up
  });
}

// -- actions -----------------------------------------------------------------------------------------------

function takeToken() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (given) {
    sessionStorage.setItem("token", given);
    history.replaceState(null, "", location.pathname); // out of sight
  }
  const kept = given ?? sessionStorage.getItem("token") ?? "";
  document.body.classList.toggle("acting", Boolean(kept));
  return kept;
}

async function act(action, body = {}) {
  let said;
  try {
    const answer = await fetch(`/actions/${action}`, {
      method: "POST",
      headers: { "Content-Type": "application/json", "X-Holdfast-Token": token },
      body: JSON.stringify(body),
    });
    const value = await answer.json();
    said = value.said ?? value.error;
  } catch {
    said = "the dashboard's server did not answer";
  }
  toast(said);
}

function sure(question, word) {
  const dialog = byId("sure");
  put("sure-text", question);
  put("sure-yes", word);
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise((resolve) => dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true }));
}

async function drain(worker) {
  if (await sure(`${worker} finishes its step and leaves. Its slot stays empty, unless a spare waits.`, "Drain")) act("drain", { worker });
}

let hiding = 0;
function toast(text) {
  put("toast", text);
  byId("toast").hidden = false;
  clearTimeout(hiding);
  hiding = setTimeout(() => { byId("toast").hidden = true; }, 6000);
}

byId("save").addEventListener("click", () => act("save"));
byId("stop").addEventListener("click", async () => {
  if (await sure("All workers finish the step, save it, and leave.", "Stop the run")) act("stop");
});
byId("share-details").addEventListener("toggle", () => showTime(story));
document.addEventListener("visibilitychange", () => { if (!document.hidden) frame ||= requestAnimationFrame(render); });
follow();
