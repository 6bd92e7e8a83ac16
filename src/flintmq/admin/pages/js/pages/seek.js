// Move a channel on the time line of its topic's log: the publish rate drawn, what will come again counted first.
import { html, useApi, useEffect, useState, useStore, address, api, clock, duration, exact, may, notify, rate, setQuery } from "../lib.js";
import { Dialog, Empty, Failure, Loading, Missing } from "../ui.js";

const HEIGHT = 96;

const local = (ms) => { const at = new Date(ms - new Date(ms).getTimezoneOffset() * 60000); return at.toISOString().slice(0, 19); };

export function TimeLine({ topic, channel }) {
  const { query } = useStore(address);
  const { data, error, reload } = useApi("/log", { topic, points: 120 }, { every: 5000 });
  const to = query.to || "";
  const [dragged, setDragged] = useState(null);
  if (error && !data) return html`<${Failure} error=${error} retry=${reload} />`;
  if (!data) return html`<${Loading} />`;
  if (!data.nodes.length || data.to <= data.from) {
    return html`<${Empty} title="There is no log to move in"><p>Set retain-age or retain-bytes in the settings of the topic to keep messages that every channel has finished.</p>
      ${data.unsupported?.length ? html`<p class="quiet">Without a log, as NSQ's own nsqd: ${data.unsupported.join(", ")}</p>` : null}</${Empty}>`;
  }
  const span = data.to - data.from;
  const place = (ms) => Math.min(1000, Math.max(0, ((ms - data.from) / span) * 1000));
  const most = Math.max(1, ...data.counts.map((one) => one || 0));
  const wide = 1000 / Math.max(1, data.counts.length);
  const here = data.positions.filter((one) => one.channel === channel && one.time !== null);
  const total = data.nodes.reduce((sum, one) => sum + (one.messages || 0), 0);
  const target = dragged ?? (to === "earliest" ? data.from : to === "latest" ? data.to : Number(to) || null);
  const settle = (ms) => { setDragged(null); setQuery({ to: String(Math.round(ms)) }); };
  const now = here.length ? Math.min(...here.map((one) => one.time)) : data.to;
  return html`<div class="panel"><div class="row"><h2 class="first">Log of ${topic}</h2><span class="quiet">${exact(total)} messages in ${duration(span / 1000)}${total ? `, at most ${rate(most / data.step)}` : ""}</span></div>
    <${Missing} nodes=${data.missing} />${data.unsupported?.length ? html`<p class="missing">Not counted and not moved, because NSQ's own nsqd has no log: ${data.unsupported.join(", ")}</p>` : null}
    <div class="timeline"><svg viewBox=${`0 0 1000 ${HEIGHT}`} preserveAspectRatio="none" role="img" aria-label=${`Publish rate of ${topic} from ${clock(data.from)} to ${clock(data.to)}`} onClick=${(event) => { const box = event.currentTarget.getBoundingClientRect(); settle(data.from + ((event.clientX - box.left) / box.width) * span); }}>
        ${data.counts.map((one, index) => (one ? html`<rect key=${index} x=${index * wide} width=${Math.max(1, wide - 0.8)} y=${HEIGHT - 2 - (one / most) * (HEIGHT - 6)} height=${2 + (one / most) * (HEIGHT - 6)} />` : null))}
        ${here.map((one) => html`<line key=${one.node} class="now" x1=${place(one.time)} x2=${place(one.time)} y1="0" y2=${HEIGHT}><title>${one.node} is at ${clock(one.time)}</title></line>`)}
        ${target === null ? null : html`<line class="to" x1=${place(target)} x2=${place(target)} y1="0" y2=${HEIGHT} />`}</svg>
      <input type="range" aria-label="Move the channel to" aria-valuetext=${clock(target ?? now)} min=${data.from} max=${data.to} step=${Math.max(1, Math.round(span / 500))} value=${target ?? now} onInput=${(event) => setDragged(Number(event.target.value))} onChange=${(event) => settle(Number(event.target.value))} />
      <div class="ends"><span>${clock(data.from)}</span><span class="legend"><i class="now"></i> ${channel} is here${target === null ? "" : html` <i class="to"></i> moves to`}</span><span>${clock(data.to)}</span></div></div>
    <div class="row seek-to"><label>Time<input key=${target} type="datetime-local" step="1" defaultValue=${target === null ? "" : local(target)} onChange=${(event) => { const ms = new Date(event.target.value).getTime(); if (ms) settle(ms); }} /></label>
      <div class="ranges" role="group" aria-label="Ends of the log"><button aria-pressed=${to === "earliest"} onClick=${() => setQuery({ to: "earliest" })}>Earliest</button><button aria-pressed=${to === "latest"} onClick=${() => setQuery({ to: "latest" })}>Latest</button></div></div>
    ${to && dragged === null ? html`<${Seek} key=${to} topic=${topic} channel=${channel} to=${to} onDone=${() => { setQuery({ to: "" }); reload(); }} />` : html`<p class="quiet">Drag the handle, click into the time line or type a time. What will be delivered again or skipped is counted before anything happens.</p>`}</div>`;
}

function Seek({ topic, channel, to, onDone }) {
  // Counted again and again: messages come and go meanwhile.
  const { data, error, reload } = useApi("/seek", { topic, channel, to }, { every: 2000 });
  const [asked, setAsked] = useState(false);
  const [failure, setFailure] = useState(null);
  useEffect(() => { setAsked(false); }, [to]);
  if (error && !data) return html`<${Failure} error=${error} retry=${reload} />`;
  if (!data) return html`<${Loading} />`;
  const words = [data.again ? html`<b>${exact(data.again)}</b> messages will be delivered again. ` : null, data.skipped ? html`<b>${exact(data.skipped)}</b> messages will be skipped and not come any more. ` : null];
  const none = !data.again && !data.skipped;
  const bad = data.nodes.filter((node) => node.error);
  const move = async () => {
    try {
      const answer = await api("/seek", { method: "POST", body: { topic, channel, to: /^\d+$/.test(to) ? Number(to) : to } });
      const failed = answer.nodes.filter((node) => node.error);
      notify(failed.length ? failed.map((node) => `${node.node}: ${node.error}`).join("; ") : `${topic}/${channel} was moved.`, failed.length ? "error" : "info");
      setAsked(false);
      onDone();
    } catch (problem) { setFailure(problem); }
  };
  const when = /^\d+$/.test(to) ? clock(Number(to)) : to === "earliest" ? "the beginning of the log" : "the end of the log";
  return html`<p role="status" class="counted">${none ? "Nothing changes: no message would come again, none be skipped." : words}</p>
    ${bad.length ? html`<p class="missing">${bad.map((node) => `${node.node}: ${node.error}`).join("; ")}</p>` : null}
    ${may("operate") ? html`<button class="primary" disabled=${none} onClick=${() => setAsked(true)}>Move the channel …</button>` : null}
    ${asked ? html`<${Dialog} title=${`Move ${topic}/${channel}?`} onClose=${() => setAsked(false)}><p>To ${when}.</p><p>${words}</p><p class="quiet">Counted from the numbers of the log: gaps in it count, so these are upper bounds.</p><${Failure} error=${failure} />
      <footer><button class=${data.skipped ? "danger" : "primary"} onClick=${move}>Move</button><span class="grow"></span><button onClick=${() => setAsked(false)}>Cancel</button></footer></${Dialog}>` : null}`;
}
