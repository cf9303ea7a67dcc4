// The parts of the page in words and tables: where a run is, what happened to it, how recipes differ, what it says.

import { bytes, colour, count, digits, disclosure, finite, h, moment, percent, s, said, seconds, table, whole } from "./dom.js";
import { paint, swatch } from "./chart.js";

const SIGNS = { training: "▶", finished: "✓", stopped: "■", failed: "✕", silent: "?", starting: "…" };

/** Where a run is. `now`: seconds since the epoch by the server's clock. */
export function story(run, i, now, several) {
  const d = run.head, unheard = Math.max(0, now - d.heard_s);
  const state = { training: "training", finished: "finished", stopped: "stopped", failed: "failed", silent: `silent for ${seconds(unheard)}`, starting: "starting" }[d.status] ?? "";
  const share = d.total_steps > 0 ? Math.min(1, d.step / d.total_steps) : null;
  const figure = (name, value, small) => h("div", {}, h("dt", {}, name), h("dd", {}, value, small ? h("small", {}, small) : null));
  const active = d.status === "training" || d.status === "silent";
  const gain = finite(d.validation) && finite(d.unigram_loss) ? d.unigram_loss - d.validation : null;
  const element = h("article", { class: "run" },
    h("div", { class: "bar" }, several ? swatch(i) : null, h("h2", {}, said(d.run || run.folder)),
      h("span", { class: `status ${d.status in SIGNS ? d.status : ""}` }, `${SIGNS[d.status] ?? ""} ${state}`),
      d.reason ? h("span", { class: "quiet" }, said(d.reason)) : null,
      h("span", {}, `step ${whole(d.step)}`, finite(d.total_steps) ? ` of ${whole(d.total_steps)}` : "")),
    share === null ? null : h("progress", { max: "1", value: share, "aria-label": `${Math.round(100 * share)} % of the steps` }),
    run.progress === null ? null : h("p", {}, h("label", {}, `reading the logs: ${Math.floor(100 * run.progress)} % `, h("progress", { max: "1", value: run.progress }))),
    run.problem ? h("p", {}, said(run.problem)) : null,
    d.broken ? h("p", { class: "quiet" }, `${whole(d.broken)} line${d.broken === 1 ? "" : "s"} of the logs could not be read and ${d.broken === 1 ? "is" : "are"} left out.`) : null,
    h("dl", { class: "figures" },
      active ? figure("time left", finite(d.left_s) ? seconds(d.left_s) : "–", finite(d.step_s) ? `${seconds(d.step_s)} a step` : "") : figure("took", finite(d.begun_s) ? seconds(d.heard_s - d.begun_s) : "–", finite(d.step_s) ? `${seconds(d.step_s)} a step` : ""),
      figure("loss", digits(d.loss)),
      figure("validation", digits(d.validation), gain === null ? "" : `${digits(Number(Math.abs(gain).toPrecision(3)))} ${gain >= 0 ? "below" : "above"} unigram`),
      figure("tokens a second", count(d.tokens_per_s), d.mfu > 0 ? `MFU ${percent(d.mfu)}` : ""),
      figure("tokens seen", count(d.tokens)),
      figure("memory", bytes(d.peak_memory_bytes), "highest rank"),
      figure("ranks", whole(d.members ?? d.world), said(d.folding_now ?? "")),
      figure("parameters", count(d.num_params), finite(d.active_params) ? `${count(d.active_params)} active` : "")));
  return paint(element, "borderLeftColor", colour(i));
}

/** Everything that interrupted or changed a run, in the order of time. */
export function happened(run) {
  const c = run.lists, events = [];
  for (const r of c.recoveries ?? []) {
    const first = r.generation === 1;
    if (first) continue;
    const lost = (r.lost_s ? c.losses ?? [] : []).filter((l) => Math.abs((l.at_s ?? l.at) - r.lost_s) < 1).map((l) => `${l.uid}: ${l.why}`).join("; ");
    events.push({ at: r.at, sign: "R", kind: "recovery", step: r.step, what: lost || r.why, chosen: `${whole(r.members)} members, ${r.folding ?? ""}`, moved: bytes(r.moved_bytes),
      took: finite(r.since_lost_s) ? r.since_lost_s : r.resumed_s, phases: [["told", r.told_s], ["noticed and waited", Math.max(0, r.noticed_s - r.formed_s)], ["connected", r.formed_s], ["built", r.built_s], ["moved state", r.moved_s]] });
  }
  for (const b of c.rollbacks ?? []) events.push({ at: b.at, sign: "B", kind: "went back", step: b.step, what: b.why, chosen: `checkpoint of step ${whole(b.step)}`, moved: "", took: null });
  for (const t of c.stragglers ?? []) events.push({ at: t.at, sign: "S", kind: "straggler", step: t.step, what: `${t.host}: ${digits(t.slowness)} times as slow`, chosen: t.put_out ? "removed" : "kept", moved: "", took: null });
  for (const m of c.moves ?? []) events.push({ at: m.at, sign: "E", kind: "experts moved", step: m.step, what: m.why, chosen: `${digits(m.before)} to ${digits(m.after)} rows of the busiest rank`, moved: `${whole(m.experts)} experts`, took: m.moved_s });
  for (const k of c.checkpoints ?? []) events.push({ at: k.at, sign: "C", kind: "checkpoint", step: k.step, what: "saved", chosen: "", moved: bytes(k.bytes), took: k.total_s, minor: true });
  for (const k of (c.starts ?? []).slice(1)) events.push({ at: k.at, sign: "▸", kind: "start", step: k.step, what: "a process started, or came back", chosen: k.folding ?? "", moved: "", took: null, minor: true });
  return events.filter((e) => finite(e.at)).sort((a, b) => a.at - b.at);
}

export function timeline(run, i, several) {
  const events = happened(run), major = events.filter((e) => !e.minor), d = run.head;
  if (!events.length) return null;
  const begin = finite(d.begun_s) ? d.begun_s : events[0].at, end = Math.max(d.heard_s, events.at(-1).at, begin + 1), width = 1000;
  const X = (at) => 14 + ((at - begin) / (end - begin)) * (width - 28);
  const picture = s("svg", { class: "timeline", viewBox: `0 0 ${width} 64`, preserveAspectRatio: "none", role: "img", "aria-label": `${major.length} events between ${moment(begin)} and ${moment(end)}; the table lists them.` }, s("line", { class: "track", x1: 10, x2: width - 10, y1: 40, y2: 40 }));
  for (const e of events) picture.append(paint(s("line", { x1: X(e.at), x2: X(e.at), y1: e.minor ? 36 : 12, y2: e.minor ? 44 : 52, "stroke-width": e.minor ? 1.5 : 4 }, s("title", {}, `${e.kind}, step ${whole(e.step)}`)), "stroke", e.minor ? "var(--quiet)" : `var(--s${{ R: 1, B: 3, S: 4, E: 2 }[e.sign] ?? 6})`));
  const rows = major.map((e) => [moment(e.at), e.kind, whole(e.step), e.what, e.chosen, e.moved, finite(e.took) ? seconds(e.took) : "–", e.phases ? e.phases.filter(([, t]) => t > 0).map(([name, t]) => `${name} ${seconds(t)}`).join(", ") : ""]);
  const minor = events.filter((e) => e.minor).slice(-100);
  return h("div", {}, several ? h("h3", {}, swatch(i), said(d.run || run.folder)) : null, picture,
    h("p", { class: "quiet" }, `${moment(begin)} to ${moment(end)}; tall marks: recoveries, ways back, stragglers, moved experts; short marks: checkpoints and starts.`),
    major.length ? table(["when", "", "after step", "what was lost, or why", "what was chosen", "moved", "next step after", "phases, slowest member"], rows, [2, 5, 6], "wide") : h("p", {}, "Nothing was lost and nobody was moved."),
    minor.length ? disclosure("Checkpoints and starts", () => table(["when", "", "step", "", "moved", "took"], minor.map((e) => [moment(e.at), e.kind, whole(e.step), e.chosen, e.moved, finite(e.took) ? seconds(e.took) : ""]), [2, 4, 5])) : null);
}

export function settings(found) {
  const names = found.names.map((name, i) => (found.read[i] ? name : `${name} (no recipe)`));
  if (found.ids.length === 1) return disclosure(`All ${found.rows.length} settings`, () => table(["setting", "value"], found.rows.map(([k, v]) => [k, v[0]])));
  if (!found.rows.length) return h("p", {}, "The recipes do not differ.");
  return h("div", {}, h("p", { class: "quiet" }, "Settings in which the runs differ; a dash: not set."), table(["setting", ...names], found.rows.map(([k, v]) => [k, ...v.map((x) => x ?? "–")])));
}

export function words(run) {
  const notes = (run.lists.notes ?? []).slice(-50).reverse(), samples = (run.lists.samples ?? []).slice(-5).reverse(), parts = [];
  for (const one of samples) parts.push(h("h3", {}, `Written after step ${whole(one.step)}`), h("pre", { tabindex: "0" }, h("strong", {}, said(one.prompt)), said(one.text)));
  if (notes.length) parts.push(h("h3", {}, "Notes"), table(["when", "", "note"], notes.map((n) => [moment(n.at), n.level, n.text])));
  return parts.length ? h("div", {}, ...parts) : null;
}
