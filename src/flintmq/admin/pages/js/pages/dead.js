// Dead letters by channel and cause, over the hours; sent back with a rate, with progress, and an end to it.
import { html, useApi, useEffect, useMemo, useRef, useState, useStore, A, Ago, address, api, channelPath, clock, count, exact, may, notify, setQuery, topicPath } from "../lib.js";
import { Dialog, Empty, Failure, Loading, Missing, useTitle } from "../ui.js";
import { firstLine, fromBase64 } from "../body.js";

const HOUR = 3600000;
const CAUSES = { requeued: "were requeued", "timed out": "timed out", expired: "expired" };

export function Dead() {
  useTitle("Dead letters");
  const { query } = useStore(address);
  const allowed = may("operate");
  const { data, error, reload } = useApi(allowed ? "/dead" : null, { topic: query.topic, channel: query.channel }, { every: 10000 });
  const [target, setTarget] = useState(null);
  const channels = useMemo(() => gather(data?.groups || []), [data]);
  const head = html`<div class="head"><h1>Dead letters</h1>${query.topic ? html`<span class="label">${query.channel ? `${query.topic}/${query.channel}` : query.topic}</span><button class="small" onClick=${() => setQuery({ topic: "", channel: "" })}>Show all</button>` : null}</div>`;
  if (!allowed) return html`${head}<${Empty} title="Bodies are not for everybody"><p>Dead letters are shown to users with the role <b>operate</b>.</p></${Empty}>`;
  if (error && !data) return html`${head}<${Failure} error=${error} retry=${reload} />`;
  if (!data) return html`${head}<${Loading} />`;
  if (!channels.length) {
    return html`${head}<${Missing} nodes=${data.missing} /><${Empty} title="No dead letters"><p>A message that fails again and again becomes a dead letter, if its channel has a limit: set <b>max-attempts</b> in the settings of a channel.
      It is then moved to a topic of its own, can be looked at here, and sent back when the cause is gone.</p><p><${A} to="/topics">Topics</${A}></p></${Empty}>`;
  }
  return html`${head}<${Missing} nodes=${data.missing} />
    ${data.complete ? null : html`<p class="missing">There are more: the newest ${exact(data.scanned)} were looked at.</p>`}
    <div class="dead-list">${channels.map((one) => html`<section key=${`${one.topic}/${one.channel}`} class="panel" aria-label=${`${one.topic}/${one.channel}`}>
      <div class="row"><h2 class="first"><${A} to=${channelPath(one.topic, one.channel)}>${one.topic}/${one.channel}</${A}></h2><span class="label amber">${exact(one.count)} dead</span><span class="quiet">in <${A} to=${topicPath(one.dead_letter_topic)}>${one.dead_letter_topic}</${A}></span>
        <span class="grow"></span><span class="actions"><${A} class="button" to="/messages" query=${{ topic: one.topic, channel: one.channel, state: "dead" }}>Look at them</${A}><button onClick=${() => setTarget(one)}>Redrive …</button></span></div>
      <${Redriving} topic=${one.topic} channel=${one.channel} onEnd=${reload} />
      <ul class="causes">${one.causes.map((cause) => html`<li key=${cause.reason}><${A} to="/messages" query=${{ topic: one.topic, channel: one.channel, state: "dead", reason: cause.reason }}><span class="cause"><b>${cause.reason}</b><span class="quiet">${exact(cause.count)}</span></span>
        <${Hours} hours=${cause.hours} label=${`${cause.reason}: dead letters in each of the last 24 hours`} /><span class="sample">${cause.newest ? html`<span class="mono">${firstLine(fromBase64(cause.newest.body))}</span><span class="quiet">newest <${Ago} at=${cause.newest.dead?.time ?? cause.newest.time} />, ${exact(cause.newest.dead?.attempts ?? 0)} attempts</span>` : null}</span></${A}>
        <button class="small" aria-label=${`Redrive those that ${CAUSES[cause.reason] || cause.reason}`} onClick=${() => setTarget({ ...one, reason: cause.reason, count: cause.count })}>Redrive …</button></li>`)}</ul>
    </section>`)}</div>
    ${target ? html`<${RedriveDialog} topic=${target.topic} channel=${target.channel} reason=${target.reason} known=${target.count} onClose=${() => { setTarget(null); reload(); }} />` : null}`;
}

/** Groups of the daemon (channel, cause, hour) by channel, then by cause. */
function gather(groups) {
  const found = new Map();
  for (const group of groups) {
    const name = `${group.topic}/${group.channel}`;
    if (!found.has(name)) found.set(name, { topic: group.topic, channel: group.channel, dead_letter_topic: group.dead_letter_topic, count: 0, causes: new Map() });
    const one = found.get(name);
    one.count += group.count;
    if (!one.causes.has(group.reason)) one.causes.set(group.reason, { reason: group.reason, count: 0, hours: new Map(), newest: null, last: 0 });
    const cause = one.causes.get(group.reason);
    cause.count += group.count;
    cause.hours.set(group.hour, (cause.hours.get(group.hour) || 0) + group.count);
    if (group.newest && group.hour >= cause.last) { cause.newest = group.newest; cause.last = group.hour; }
  }
  return [...found.values()].map((one) => ({ ...one, causes: [...one.causes.values()].sort((a, b) => b.count - a.count) })).sort((a, b) => b.count - a.count);
}

function Hours({ hours, label }) {
  const last = Math.floor(Date.now() / HOUR) * HOUR;
  const values = Array.from({ length: 24 }, (_, index) => [last - (23 - index) * HOUR, hours.get(last - (23 - index) * HOUR) || 0]);
  const most = Math.max(1, ...values.map(([, value]) => value));
  return html`<svg class="hours" viewBox="0 0 144 32" role="img" aria-label=${label}>${values.map(([at, value], index) => html`<rect key=${at} class=${value ? "" : "none"} x=${index * 6} width="5" y=${value ? 30 - (value / most) * 28 : 30} height=${value ? 2 + (value / most) * 28 : 2}><title>${clock(at)}: ${value}</title></rect>`)}</svg>`;
}

/** A redrive that runs, whoever started it. */
function Redriving({ topic, channel, onEnd }) {
  const { data, reload } = useApi("/redrive", { topic, channel }, { every: 1500 });
  const ran = useRef(false);
  useEffect(() => {
    if (ran.current && data && !data.running) onEnd();
    ran.current = Boolean(data?.running);
  }, [data?.running]);
  return data?.running ? html`<${RedriveProgress} data=${data} onStop=${reload} />` : null;
}

// How many there are of one cause is known at its end: until then the daemon counts those of other causes as well.
function RedriveProgress({ data, onStop }) {
  const [busy, setBusy] = useState(false);
  const stop = async () => {
    setBusy(true);
    try { onStop(await api("/redrive", { method: "DELETE", query: { topic: data.topic, channel: data.channel } })); } catch (error) { notify(error.words, "error"); } finally { setBusy(false); }
  };
  return html`<div class="row redriving"><span role="status">${exact(data.moved)} of ${data.reason ? "at most " : ""}${exact(data.planned)} sent back${data.reason ? ` (${data.reason})` : ""}</span><progress class="grow" aria-label="Sent back" max=${data.planned || 1} value=${data.moved}></progress>
    ${data.running && may("operate") ? html`<button type="button" class="small" disabled=${busy} onClick=${stop}>Stop</button>` : null}</div>`;
}

export function RedriveDialog({ topic, channel, reason, known, onClose }) {
  const [state, setState] = useState(null);
  const [failure, setFailure] = useState(null);
  const here = useRef(true);
  useEffect(() => { here.current = true; return () => { here.current = false; }; }, []);
  const start = async (event) => {
    event.preventDefault();
    const form = new FormData(event.target);
    const given = Object.fromEntries(["count", "rate"].map((key) => [key, Number(form.get(key)) || undefined]));
    setFailure(null);
    try {
      let now = await api("/redrive", { method: "POST", body: { topic, channel, reason, ...given, from: form.get("from")?.trim() || undefined } });
      setState(now);
      while (now.running && here.current) {
        await new Promise((resolve) => { setTimeout(resolve, 400); });
        now = await api("/redrive", { query: { topic, channel } });
        if (here.current) setState(now);
      }
      if (now.error === "stopped") return;
      const bad = now.error || now.nodes?.filter((node) => node.error).map((node) => `${node.node}: ${node.error}`).join("; ");
      if (!now.running) notify(bad ? `Redrive of ${topic}/${channel}: ${bad}` : `${exact(now.moved)} dead letters went back to ${topic}/${channel}.`, bad ? "error" : "info");
    } catch (error) { setFailure(error); }
  };
  const done = state && !state.running;
  return html`<${Dialog} title=${`Redrive dead letters of ${topic}/${channel}?`} onClose=${onClose}><form onSubmit=${start}>
    <p>${known ? html`<b>${count(known)}</b> dead letters` : "Dead letters"}${reason ? html` that <b>${CAUSES[reason] || reason}</b>` : null} go back to this channel only. Their attempts start anew; those that fail again come back here.</p>
    ${state ? html`<${RedriveProgress} data=${state} onStop=${setState} />${done ? state.error === "stopped" ? html`<p>■ Stopped: ${exact(state.moved)} sent back, the others stay dead letters.</p>` : html`<p class="all-well">● Done: ${exact(state.moved)} sent back.</p>` : html`<p class="quiet">It goes on if you close this.</p>`}` : html`
      <div class="fields"><label>At most<input name="count" type="number" min="1" placeholder="all" /></label><label>Per second<input name="rate" type="number" min="1" placeholder="as fast as possible" /></label></div>
      <details><summary>Other channel of the dead-letter topic</summary><label>Take them from<input name="from" placeholder="redrive" /></label></details>`}
    <${Failure} error=${failure} />
    <footer>${state ? null : html`<button class="primary">Redrive</button>`}<span class="grow"></span><button type="button" onClick=${onClose}>${state ? "Close" : "Cancel"}</button></footer></form></${Dialog}>`;
}

