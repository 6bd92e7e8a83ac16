// Readers of logs, such as Spark: how far behind, how fast, what is kept for them.
import { html, useApi, useState, A, Ago, api, bytes, count, exact, may, nodePath, notify, rate, topicPath } from "../lib.js";
import { Chart, Command, Dialog, Empty, Failure, Label, Loading, Missing, Table, useHistory, useTitle } from "../ui.js";

export function Pipelines() {
  useTitle("Pipelines");
  const { data, error, reload } = useApi("/pipelines", {}, { every: 5000 });
  const [gone, setGone] = useState(null);
  const head = html`<div class="head"><h1>Pipelines</h1>${data?.readers.length ? html`<span class="quiet">${exact(data.readers.length)} readers of logs</span>` : null}</div>`;
  if (error && !data) return html`${head}<${Failure} error=${error} retry=${reload} />`;
  if (!data) return html`${head}<${Loading} />`;
  if (!data.readers.length) {
    return html`${head}<${Missing} nodes=${data.missing} /><${Empty} title="Nobody reads a log"><p>Spark reads topics from their logs and leaves its position with the broker, which keeps what it has not read yet. Lag and throughput of each query are shown here.</p>
      <${Command}>${'spark.readStream.format("nsq").option("topic", "orders").load()'}</${Command}></${Empty}>`;
  }
  return html`${head}<${Missing} nodes=${data.missing} />
    <div class="cards">${data.readers.map((reader) => html`<${Card} key=${reader.reader} reader=${reader} at=${data.at} onRemove=${() => setGone(reader)} />`)}</div>
    ${gone ? html`<${Forget} reader=${gone} onClose=${() => setGone(null)} onDone=${() => { setGone(null); reload(); }} />` : null}`;
}

const LAG = [{ key: "lag", title: "lag", colour: "grey-series", area: true }];
const THROUGHPUT = [{ key: "throughput", title: "read", colour: "blue" }];

function Card({ reader, at, onRemove }) {
  const past = useHistory("reader", reader.reader, "1h", { lag: reader.lag, throughput: reader.throughput, at });
  return html`<section class="panel reader" aria-label=${reader.reader}><div class="row"><h2 class="first">${reader.reader}</h2>${reader.orphaned ? html`<${Label} kind="amber">orphaned</${Label}>` : null}${reader.temporary ? html`<${Label}>temporary</${Label}>` : null}
      <span class="grow"></span>${may("admin") ? html`<button class="small danger-quiet" onClick=${onRemove}>Forget …</button>` : null}</div>
    <p class="quiet">reads ${reader.topics.map((topic, index) => html`${index ? ", " : ""}<${A} to=${topicPath(topic)}>${topic}</${A}>`)}, moved <${Ago} at=${reader.moved} /></p>
    ${reader.orphaned ? html`<p class="missing">It has not moved for an hour. If nobody uses it any more, forget it, so that its files can be deleted.</p>` : null}
    <dl class="numbers"><div><dt>Lag</dt><dd>${count(reader.lag)}</dd></div><div><dt>Throughput</dt><dd>${rate(reader.throughput)}</dd></div><div><dt>Kept for it</dt><dd>${bytes(reader.bytes)}</dd></div></dl>
    <div class="charts small"><${Chart} title="Lag" height=${110} series=${LAG} data=${past} /><${Chart} title="Read per second" height=${110} series=${THROUGHPUT} data=${past} format=${rate} /></div>
    <${Table} label=${`positions of ${reader.reader}`} rows=${reader.positions} name=${(one) => `${one.topic} ${one.node}`} columns=${[
      { key: "topic", title: "Topic", main: true }, { key: "node", title: "Node", render: (one) => html`<${A} to=${nodePath(one.node)}>${one.node}</${A}>` }, { key: "lag", title: "Lag", num: true, render: (one) => count(one.lag) },
      { key: "throughput", title: "Read", num: true, render: (one) => rate(one.throughput) }, { key: "bytes", title: "Kept", num: true, card: false, render: (one) => bytes(one.bytes) }]} /></section>`;
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
