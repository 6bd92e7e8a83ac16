// The log of actions, and the counter of all messages.
import { html, useEffect, useRef, useScope, useState, useStore, A, Ago, address, channelPath, exact, lastAction, link, nodePath, rate, topicPath } from "../lib.js";
import { Empty, Label, List, useTitle } from "../ui.js";

export function ActionLog() {
  useTitle("Actions");
  const { query } = useStore(address);
  const newest = useStore(lastAction);
  const target = (row) => (row.channel ? html`<${A} to=${channelPath(row.topic, row.channel)}>${row.topic}/${row.channel}</${A}>` : row.topic ? html`<${A} to=${topicPath(row.topic)}>${row.topic}</${A}>` : row.node ? html`<${A} to=${nodePath(row.node)}>${row.node}</${A}>` : "");
  const columns = () => [
    { key: "time", title: "When", sort: null, render: (row) => html`<${Ago} at=${row.time} />` },
    { key: "user", title: "Who", sort: null, render: (row) => html`<span title=${`${row.role || ""} from ${row.remote || ""}`}>${row.user || html`<span class="quiet">${row.remote || "nobody"}</span>`}</span>` },
    { key: "action", title: "What", sort: null, main: true, render: (row) => row.action.replaceAll("_", " ") },
    { key: "target", title: "On", sort: null, render: target },
    { key: "detail", title: "Detail", sort: null, wrap: true, card: false, render: (row) => row.detail || "" },
    { key: "result", title: "Result", sort: null, render: (row) => html`<${Label} kind=${{ ok: "green", partly: "amber", failed: "red" }[row.result]} title=${row.message}>${row.result}</${Label}>` },
  ];
  return html`<div class="head"><h1>Actions</h1><span class="actions"><a class="button" href=${link("/api/v2/actions", { format: "csv", filter: query.filter })} download="actions.csv">Export CSV</a>
      <a class="button" href=${link("/api/v2/actions", { format: "jsonl", filter: query.filter })} download="actions.jsonl">Export JSON lines</a></span></div>
    <${List} path="/actions" label="actions" columns=${columns} fresh=${newest} name=${(row) => `${row.time} ${row.action} ${row.topic} ${row.channel} ${row.node} ${row.detail}`} every=${10000}
      empty=${html`<${Empty} title="Nothing was done yet"><p>Each action through nsqadmin, such as a pause, a publish or a changed setting, is listed here with its user. The list is kept in memory; <b>--action-log</b> names a file that keeps it for good.</p></${Empty}>`} />`;
}

export function Counter() {
  useTitle("Message counter");
  const cluster = useScope("cluster");
  const [shown, setShown] = useState(null);
  const from = useRef({ value: 0, at: 0, rate: 0 });
  const total = cluster?.totals?.message_count;
  const speed = cluster?.totals?.published || 0;
  useEffect(() => {
    if (total === undefined || total === null) return undefined;
    from.current = { value: total, at: performance.now(), rate: speed };
    if (matchMedia("(prefers-reduced-motion: reduce)").matches || !speed) { setShown(total); return undefined; }
    // Between two samples it goes on at the last rate, for three seconds at most.
    const timer = setInterval(() => {
      const { value, at, rate: pace } = from.current;
      setShown(Math.round(value + pace * Math.min(3, (performance.now() - at) / 1000)));
    }, 100);
    return () => clearInterval(timer);
  }, [total, speed]);
  return html`<div class="head"><h1>Message counter</h1></div><div class="panel"><p class="odometer">${exact(shown)}</p><p class="centre quiet">messages published since the nodes started, ${rate(speed)} now</p></div>`;
}
