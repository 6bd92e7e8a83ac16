// Streaming queries and readers of logs: how far behind, how fast, what is kept for them.
import { html, useApi, useState, useStore, A, Ago, address, api, bytes, count, duration, exact, many, may, nodePath, notify, rate, topicPath } from "../lib.js";
import { Chart, Command, Dialog, Empty, Failure, Label, Loading, Missing, Sparkline, Table, counted, rated, sized, useHistory, useSparklines, useTitle } from "../ui.js";

export function Pipelines() {
  useTitle("Pipelines");
  const topic = useStore(address).query.topic || "";
  const { data, error, reload } = useApi("/pipelines", { topic }, { every: 2000 });
  const [gone, setGone] = useState(null);
  const head = html`<div class="head"><h1>Pipelines</h1>${topic ? html`<span class="quiet">of <${A} to=${topicPath(topic)}>${topic}</${A}></span><${A} to="/pipelines">Show all</${A}>` : null}</div>`;
  if (error && !data) return html`${head}<${Failure} error=${error} retry=${reload} />`;
  if (!data) return html`${head}<${Loading} />`;
  const { queries, readers } = data;
  if (!queries.length && !readers.length) {
    return html`${head}<${Missing} nodes=${data.missing} /><${Empty} title=${topic ? `No pipeline reads ${topic}` : "No pipelines yet"}><p>Spark reads topics from their logs. Each query reports its batches, rows, lag and state here, and the broker keeps what it has not read yet. For example:</p>
      <${Command}>${`flintmq pipeline archive ${topic || "orders"} --to ./archive`}</${Command}></${Empty}>`;
  }
  return html`${head}<${Missing} nodes=${data.missing} />${error ? html`<${Failure} error=${error} />` : null}
    <section aria-label="Queries"><h2 class="first">Queries</h2>${queries.length ? html`<${Queries} rows=${queries} />` : html`<p class="quiet">None reports itself. Those of flintmq do, and Spark programs after this line:</p>
      <${Command}>${'flintmq.spark.report_queries(spark, {"nsq.nsqd.addresses": "127.0.0.1:4150"})'}</${Command}>`}</section>
    ${readers.length ? html`<section aria-label="Readers of logs"><h2>Readers of logs</h2>
      <div class="cards">${readers.map((reader) => html`<${Card} key=${reader.reader} reader=${reader} at=${data.at} queries=${queries.filter((one) => one.readers.includes(reader.reader))} onRemove=${() => setGone(reader)} />`)}</div></section>` : null}
    ${gone ? html`<${Forget} reader=${gone} onClose=${() => setGone(null)} onDone=${() => { setGone(null); reload(); }} />` : null}`;
}

const STATES = { running: "green", failed: "red", silent: "amber" };
const topicLinks = (topics) => topics.map((topic, index) => html`${index ? ", " : ""}<${A} to=${topicPath(topic)}>${topic}</${A}>`);

/** On the page of a topic: the queries that read it or publish to it. */
export function QueriesOf({ topic }) {
  const { data } = useApi("/pipelines", { topic }, { every: 5000 });
  if (!data?.queries.length) return null;
  return html`<div class="section-head"><h2>Pipelines</h2><${A} to="/pipelines" query=${{ topic }}>All about them</${A}></div><${Queries} rows=${data.queries} />`;
}

function Queries({ rows }) {
  const drawn = useSparklines({ kind: "query", series: ["rows_per_second", "lag"] }, rows, (row) => row.id);
  const spark = (key, title, colour) => ({ key: `spark-${key}`, title: "", card: false, render: (row) => html`<${Sparkline} values=${drawn[row.id]?.[key]} colour=${colour} label=${`${title} of ${row.label}, last hour`} />` });
  const number = (key, title, render) => ({ key, title, num: true, render });
  return html`<${Table} label="queries" rows=${rows.map((row) => ({ ...row, up: row.state === "running" }))} name=${(row) => row.id} columns=${[
    { key: "label", title: "Query", main: true, wrap: true, render: (row) => html`<b title=${`${row.id} on ${row.host}, reports to ${row.nodes.join(", ")}`}>${row.label}</b> <${Label} kind=${STATES[row.state]} title=${row.state === "silent" ? "It has not reported for a minute" : null}>${row.state}</${Label}>${row.error ? html`<br /><span class="quiet">${row.error}</span>` : null}` },
    { key: "topics", title: "Reads", wrap: true, render: (row) => html`${row.topics.length ? topicLinks(row.topics) : "–"}${row.writes.length ? html` → ${topicLinks(row.writes)}` : null}` },
    rated("rows_per_second", "Rows", { hint: "By the second of the last batch" }), spark("rows_per_second", "rows", "blue"),
    counted("lag", "Lag", { hint: "Messages that it has not read" }), spark("lag", "lag", "grey"),
    number("batch_seconds", "Batch time", (row) => html`<span title=${`batch ${exact(row.batch)}`}>${duration(row.batch_seconds)}</span>`),
    number("state_bytes", "State", (row) => html`<span title=${many(row.state_rows, "rows")}>${bytes(row.state_bytes)}</span>`),
    number("progress", "Last batch", (row) => html`<${Ago} at=${row.progress} />`),
  ]} />`;
}

// --- Readers

const LAG = [{ key: "lag", title: "lag", colour: "grey-series", area: true }];
const THROUGHPUT = [{ key: "throughput", title: "read", colour: "blue" }];

function Card({ reader, at, queries, onRemove }) {
  const past = useHistory("reader", reader.reader, "1h", { lag: reader.lag, throughput: reader.throughput, at });
  return html`<section class="panel reader" aria-label=${reader.reader}><div class="row"><h3 class="first">${reader.reader}</h3>${reader.orphaned ? html`<${Label} kind="amber">orphaned</${Label}>` : null}${reader.temporary ? html`<${Label}>temporary</${Label}>` : null}
      <span class="grow"></span>${may("admin") ? html`<button class="small danger-quiet" onClick=${onRemove}>Forget …</button>` : null}</div>
    <p class="quiet">reads ${topicLinks(reader.topics)}, moved <${Ago} at=${reader.moved} />${queries.length ? html`, of the query ${queries.map((one) => one.label).join(", ")}` : null}</p>
    ${reader.orphaned ? html`<p class="missing">It has not moved for an hour. If nobody uses it any more, forget it, so that its files can be deleted.</p>` : null}
    <dl class="numbers"><div><dt>Lag</dt><dd>${count(reader.lag)}</dd></div><div><dt>Throughput</dt><dd>${rate(reader.throughput)}</dd></div><div><dt>Kept for it</dt><dd>${bytes(reader.bytes)}</dd></div></dl>
    <div class="charts small"><${Chart} title="Lag" height=${110} series=${LAG} data=${past} /><${Chart} title="Read per second" height=${110} series=${THROUGHPUT} data=${past} format=${rate} /></div>
    <${Table} label=${`positions of ${reader.reader}`} rows=${reader.positions} name=${(one) => `${one.topic} ${one.node}`} columns=${[
      { key: "topic", title: "Topic", main: true }, { key: "node", title: "Node", render: (one) => html`<${A} to=${nodePath(one.node)}>${one.node}</${A}>` }, counted("lag", "Lag"),
      rated("throughput", "Read"), sized("bytes", "Kept", { card: false })]} /></section>`;
}

function Forget({ reader, onClose, onDone }) {
  const [failure, setFailure] = useState(null);
  const [typed, setTyped] = useState("");
  const forget = async (event) => {
    event.preventDefault();
    try {
      const answer = await api(`/pipelines/${encodeURIComponent(reader.reader)}`, { method: "DELETE" });
      const bad = Object.entries(answer.errors || {});
      notify(bad.length ? bad.map(([node, words]) => `${node}: ${words}`).join("; ") : `${reader.reader} is forgotten, ${exact(answer.removed)} positions.`, bad.length ? "error" : "info");
      onDone();
    } catch (error) { setFailure(error); }
  };
  return html`<${Dialog} title=${`Forget the reader ${reader.reader}?`} onClose=${onClose}><form onSubmit=${forget}>
    <p>Its ${exact(reader.positions.length)} positions are deleted, and so may be the files that are kept for it: <b>${exact(reader.lag)} messages</b> (${bytes(reader.bytes)}) that it has not read. A query that still uses it fails.</p>
    <label>Type <b>${reader.reader}</b> to confirm<input name="confirm" autocomplete="off" value=${typed} onInput=${(event) => setTyped(event.target.value)} /></label><${Failure} error=${failure} />
    <footer><button class="danger" disabled=${typed !== reader.reader}>Forget</button><span class="grow"></span><button type="button" onClick=${onClose}>Cancel</button></footer></form></${Dialog}>`;
}
