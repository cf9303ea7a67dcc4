// Follows the chosen runs and keeps the page up to date: asks for everything once, then waits for what is new.

import { ask, byId, bytes, count, digits, finite, h, percent, said, seconds, whole } from "./dom.js";
import { Chart, swatch } from "./chart.js";
import { Heat, Lanes } from "./maps.js";
import { Holders } from "./holders.js";
import { settings, story, timeline, words } from "./parts.js";

const LISTS = ["starts", "checkpoints", "notes", "samples", "recoveries", "rollbacks", "losses", "stragglers", "moves", "recorded", "placed"];
const MOST = 8;
const runs = new Map();
/** Pictures of who holds what, by run: each keeps what was chosen. */
const held = new Map();
const shared = { range: null, choose(range) { shared.range = range; byId("whole").hidden = !range; drawCharts(); if (range) closer(range); } };
const byValue = (name) => (run) => points(run, name);
const CHARTS = [
  [new Chart({ title: "Loss", unit: "nats", shared }), byValue("loss"), (run) => run.validations.map(([step, v]) => [step, v])],
  [new Chart({ title: "Speed", unit: "tokens/s", format: count, shared }), byValue("tokens_per_s")],
  [new Chart({ title: "MFU", format: percent, shared }), byValue("mfu")],
  [new Chart({ title: "Duration of a step", format: seconds, shared }), byValue("step_s")],
  [new Chart({ title: "Gradient norm", shared }), byValue("grad_norm")],
  [new Chart({ title: "Learning rate", format: digits, shared }), byValue("lr")],
  [new Chart({ title: "Memory, highest rank", format: bytes, base: 2, shared }), byValue("peak_memory_bytes")],
  [new Chart({ title: "Fullest expert over the mean", shared }), byValue("load")],
  [new Chart({ title: "Experts without a token", format: count, shared }), (run) => anyOf(points(run, "dead_experts"))],
  [new Chart({ title: "Waiting for dispatch and combine", format: seconds, shared }), byValue("exposed_s")],
  [new Chart({ title: "Waiting for data", format: seconds, shared }), byValue("data_s")],
  [new Chart({ title: "Slowest host over the others", shared }), byValue("slowness")],
];
const overview = new Heat("Fullest expert over the mean, by MoE layer", "layer"), experts = new Heat("Every expert of the layer", "expert"), lanes = new Lanes();
let polling = null, offset = 0;
/** The runs whose lists are shown; null: some have changed. What has the focus stays where nothing did. */
let listed = null;

const chosen = () => [...runs.values()];
const anyOf = (list) => (list.some(([, v]) => v > 0) ? list : []);

/** [middle, mean, least, largest, first step, last step] of a figure in each group of steps; where the range was looked at closer, from that. */
function points(run, name) {
  const source = shared.range && run.zoom ? run.zoom : run.curves, mean = source.mean[name];
  if (!mean) return [];
  const [low, high] = source.range[name] ?? [], newest = run.head.step || Infinity;
  return mean.map((v, i) => {
    const first = source.first + i * source.width, last = Math.max(first, Math.min(newest, first + source.width - 1));
    return [Math.round((first + last) / 2), v, low?.[i], high?.[i], first, last];
  }).filter(([, v]) => finite(v));
}

// ---- what came from the server ---------------------------------------------------------------------------------------

function take(found) {
  const old = runs.get(found.id);
  if (!old) return;
  const run = { ...old, ...found };
  offset = found.head.now_s - Date.now() / 1000;
  if (old.curves && found.curves.first > 1 && old.curves.width === found.curves.width) run.curves = joined(old.curves, found.curves);
  run.validations = (found.validations ?? old.validations).toSorted((a, b) => a[0] - b[0]);
  run.lists = { ...(old.lists ?? {}) };
  for (const name of LISTS) if (found[name]) [run.lists[name], listed] = [found[name], null];
  runs.set(found.id, run);
}

/** Groups that came newly, in the place of those from there on. */
function joined(old, more) {
  const at = (more.first - old.first) / more.width, count = at + more.times.length, out = { ...old, times: [...old.times.slice(0, at), ...more.times], mean: {}, range: {} };
  const fill = (a, b) => [...Array.from({ length: at }, (_, i) => a?.[i] ?? null), ...Array.from({ length: count - at }, (_, i) => b?.[i] ?? null)];
  for (const name of new Set([...Object.keys(old.mean), ...Object.keys(more.mean)])) out.mean[name] = fill(old.mean[name], more.mean[name]);
  for (const name of new Set([...Object.keys(old.range), ...Object.keys(more.range)])) out.range[name] = [0, 1].map((k) => fill(old.range[name]?.[k], more.range[name]?.[k]));
  return out;
}

async function open(ids) {
  for (const id of [...runs.keys()]) if (!ids.includes(id)) runs.delete(id);
  for (const id of ids) if (!runs.has(id)) runs.set(id, { id, validations: [], lists: {} });
  location.replace("#" + ids.join(","));
  await Promise.all(ids.map(async (id) => take(await ask(`/run/${id}/all`))));
  draw();
  performance.mark("drawn");
  slow();
  follow();
}

/** One request waits for news of all runs at a time. */
async function follow() {
  if (polling) polling.stopped = true;
  const mine = (polling = { stopped: false });
  let failures = 0;
  while (!mine.stopped) {
    try {
      const asked = chosen().map((r) => [r.id, r.version, r.progress ?? "-", r.curves.width, Math.max(1, r.curves.first + (r.curves.times.length - 1) * r.curves.width)].join(":"));
      const news = await ask("/changes?of=" + asked.join(","));
      if (mine.stopped) return;
      failures = 0;
      say("");
      const before = marks();
      news.runs.forEach(take);
      draw();
      if (marks() !== before) slow();
      await pause(150);
    } catch (error) {
      if (mine.stopped) return;
      failures++;
      if (failures > 1) say(`No answer from phalanx watch (${error.message}); what is shown is as it was. Trying again.`);
      await pause(Math.min(10000, 500 * 2 ** failures));
    }
  }
}

const pause = (ms) => new Promise((done) => setTimeout(done, ms));
const marks = () => JSON.stringify(chosen().map((r) => [r.head.folding_now, r.experts, (r.lists.recorded ?? []).length, r.lists.placed?.at(-1)?.at]));

function say(text) {
  byId("connection").hidden = !text;
  byId("connection").textContent = text;
}

async function closer([first, last]) {
  await Promise.all(chosen().map(async (run) => {
    const found = await ask(`/run/${run.id}/zoom?first=${first}&last=${last}`).catch(() => null);
    const now = runs.get(run.id);
    if (now && found) now.zoom = found;
  }));
  if (shared.range && shared.range[0] === first && shared.range[1] === last) drawCharts();
}

// ---- drawing ---------------------------------------------------------------------------------------------------------

function draw() {
  const all = chosen(), several = all.length > 1, now = Date.now() / 1000 + offset;
  document.title = all.length === 1 ? `${all[0].head.run ?? all[0].folder} ${whole(all[0].head.step)} – Phalanx` : `${all.length} runs – Phalanx`;
  byId("watching").replaceChildren(all.length === 1 ? said(all[0].folder) : `${all.length} runs`);
  byId("story").replaceChildren(...all.map((run, i) => story(run, i, now, several)));
  byId("figures").hidden = !all.some((run) => run.curves.times.length);
  drawCharts();
  const seen = all.find((run) => run.id === byId("experts-run").value) ?? all[0];
  byId("experts").hidden = !all.some((run) => run.layers);
  if (seen?.layers) overview.show(seen.layers, seen.experts.layers);
  if (listed !== null && listed === [...runs.keys()].join()) return;
  listed = [...runs.keys()].join();
  const lines = all.map((run, i) => timeline(run, i, several)).filter(Boolean);
  byId("recoveries").hidden = !lines.length;
  keepOpen(byId("happened"), lines);
  const said_ = all.map(words).filter(Boolean);
  byId("words").hidden = !said_.length;
  byId("said").replaceChildren(...said_);
}

/** Put new parts in place, with those disclosures open that were. */
function keepOpen(place, parts) {
  const were = [...place.querySelectorAll("details")].map((d) => d.open);
  place.replaceChildren(...parts);
  place.querySelectorAll("details").forEach((d, i) => { if (were[i]) d.open = true; });
}

function drawCharts() {
  const all = chosen(), several = all.length > 1, label = (run) => run.head.run || run.folder;
  byId("range").textContent = shared.range ? `steps ${whole(shared.range[0])} to ${whole(shared.range[1])}` : "";
  for (const [chart, figure, validation] of CHARTS) {
    const series = all.map((run, i) => ({ tone: i, name: several ? label(run) : validation ? "training" : chart.title, points: figure(run) }));
    if (validation) series.push(...all.map((run, i) => ({ tone: several ? i : 1, name: several ? `${label(run)}, validation` : "validation", points: validation(run), marks: true })));
    chart.show(series);
  }
}

/** What needs requests of its own: the mapping, the experts, the recorded steps, the recipes. */
async function slow() {
  const all = chosen(), several = all.length > 1;
  options(byId("experts-run"), all.filter((r) => r.layers).map((r) => [r.id, r.head.run || r.folder]));
  byId("experts-run").parentElement.hidden = !several;
  showExperts();
  for (const id of held.keys()) if (!runs.has(id)) held.delete(id);
  for (const { id } of all) if (!held.has(id)) held.set(id, new Holders(id));
  const pictures = all.map((run) => held.get(run.id)), place = byId("foldings");
  await Promise.all(pictures.map((picture, i) => picture.ask(all[i], i, several)));
  byId("mapping").hidden = !all.some((run) => run.head.folding_now);
  if (pictures.length !== place.children.length || pictures.some((p, i) => place.children[i] !== p.element)) place.replaceChildren(...pictures.map((p) => p.element));
  const recorded = all.flatMap((run) => [...new Set((run.lists.recorded ?? []).filter((r) => r.committed !== false).map((r) => r.step))].map((step) => [`${run.id}/${step}`, several ? `${whole(step)} of ${run.head.run || run.folder}` : whole(step)]));
  byId("steps").hidden = !recorded.length;
  if (options(byId("step"), recorded)) showLanes();
  const recipes = await ask("/recipes?of=" + all.map((run) => run.id).join(",")).catch(() => null);
  byId("recipe").hidden = !recipes;
  byId("recipe-title").textContent = several ? "Differences of the recipes" : "Recipe";
  if (recipes) byId("settings").replaceChildren(settings(recipes));
}

/** Whether the choice is another one than before. */
function options(select, entries) {
  const before = select.value, had = select.options.length;
  select.replaceChildren(...entries.map(([value, text]) => h("option", { value }, text)));
  if (entries.some(([value]) => value === before)) select.value = before;
  return entries.length > 0 && (select.value !== before || !had);
}

async function showExperts() {
  const run = runs.get(byId("experts-run").value) ?? chosen()[0];
  if (!run) return;
  options(byId("layer"), run.experts.layers.map((number, i) => [String(i), `${number}`]));
  byId("layer").parentElement.hidden = !run.experts.layers.length;
  overview.show(run.layers, run.experts.layers);
  experts.show(run.experts.layers.length ? await ask(`/run/${run.id}/experts?layer=${byId("layer").value || 0}`).catch(() => null) : null);
}

async function showLanes() {
  const [id, step] = byId("step").value.split("/");
  lanes.show({ problem: `reading the logs of step ${step}` });
  lanes.show(await ask(`/run/${id}/lanes?step=${step}`).catch((error) => ({ problem: error.message })));
}

// ---- which runs ------------------------------------------------------------------------------------------------------

async function list() {
  const found = await ask("/runs");
  const boxes = found.runs.map((run) => {
    const box = h("input", { type: "checkbox", value: run.id, checked: runs.has(run.id), onchange: choose });
    return h("label", {}, box, said(run.folder), h("span", { class: "quiet" }, `${run.status}, step ${whole(run.step)}, loss ${digits(run.loss)}`));
  });
  byId("list").replaceChildren(boxes.length ? h("p", { class: "quiet" }, `Up to ${MOST} beside one another.`) : h("p", {}, "There are no runs yet."), ...boxes);
}

function choose(event) {
  const ids = [...byId("list").querySelectorAll("input:checked")].map((box) => box.value);
  if (ids.length > MOST || !ids.length) { event.target.checked = !event.target.checked; return; }
  shared.range = null;
  open(ids).catch((error) => say(error.message));
}

async function start() {
  byId("charts").append(...CHARTS.map(([chart]) => chart.element));
  byId("heat").append(overview.element, experts.element);
  byId("lanes").append(lanes.element);
  byId("whole").addEventListener("click", () => shared.choose(null));
  byId("layer").addEventListener("change", showExperts);
  byId("experts-run").addEventListener("change", showExperts);
  byId("step").addEventListener("change", () => { lanes.zoom = null; showLanes(); });
  byId("picker").addEventListener("toggle", () => byId("picker").open && list().catch((error) => say(error.message)));
  document.addEventListener("keydown", (e) => { if (e.key === "Escape" && byId("picker").open) { byId("picker").open = false; byId("picker").querySelector("summary").focus(); } });
  document.addEventListener("click", (e) => { if (!byId("picker").contains(e.target)) byId("picker").open = false; });
  setInterval(() => { if (chosen().some((r) => r.head?.status === "silent" || r.head?.status === "training")) byId("story").replaceChildren(...chosen().map((run, i) => story(run, i, Date.now() / 1000 + offset, runs.size > 1))); }, 5000);
  setInterval(() => { if (chosen().some((r) => r.head?.status === "training")) showExperts(); }, 10000);
  const known = await ask("/first"), wanted = decodeURIComponent(location.hash.slice(1)).split(",").filter((id) => known.all.includes(id));
  const ids = wanted.length ? wanted : known.ids;
  if (!ids.length) { byId("story").replaceChildren(h("p", {}, "There are no runs yet. This page shows the first one as soon as it has logged something.")); setTimeout(() => location.reload(), 3000); return; }
  await open(ids.slice(0, MOST));
}

start().catch((error) => say(`The page cannot be drawn: ${error.message}`));
