// Clients: consumers and producers, paged and filtered on the server.
import { html, useApi, useStore, A, Ago, address, channelPath, clock, exact, nodePath, setQuery, topicPath } from "../lib.js";
import { Dialog, Empty, Failure, Label, List, Loading, counted, useTitle } from "../ui.js";

export function Clients() {
  useTitle("Clients");
  return html`<div class="head"><h1>Clients</h1></div><${ClientList} />`;
}

const secure = (row) => [row.tls && (row.tls_version || "TLS"), row.deflate && "deflate", row.snappy && "snappy", row.sample_rate ? `${row.sample_rate} % sample` : ""].filter(Boolean).join(", ");

export function ClientList({ query = {} }) {
  const { query: state } = useStore(address);
  const columns = () => [
    { key: "client_id", title: "Client", main: true, render: (row) => html`<a href="#client" onClick=${(event) => { event.preventDefault(); setQuery({ id: row.id }, { replace: false }); }}>${row.client_id || row.remote_address}</a>` },
    { key: "hostname", title: "Host", card: false },
    { key: "remote_address", title: "Address", card: false },
    !query.channel && { key: "channel", title: "Reads", render: (row) => (row.channel ? html`<${A} to=${channelPath(row.topic, row.channel)}>${row.topic}/${row.channel}</${A}>` : html`<span class="quiet">publishes${row.topic ? ` ${row.topic}` : ""}</span>`) },
    { key: "node", title: "Node", card: false, render: (row) => html`<${A} to=${nodePath(row.node)}>${row.node}</${A}>` },
    counted("ready", "RDY", { card: false }),
    counted("in_flight", "In flight"),
    counted("message_count", "Messages"),
    { key: "connected_at", title: "Connected", num: true, card: false, render: (row) => html`<${Ago} at=${row.connected_at} />` },
    { key: "tls", title: "", sort: null, card: false, render: (row) => (secure(row) ? html`<${Label}>${secure(row)}</${Label}>` : null) },
  ].filter(Boolean);
  return html`<${List} path="/clients" query=${query} label="clients" columns=${columns} name=${(row) => row.id} every=${5000}
      empty=${html`<${Empty} title="Nobody is connected"><p>Consumers and producers appear here when they connect to a node.</p></${Empty}>`} />
    ${state.id ? html`<${ClientDialog} id=${state.id} />` : null}`;
}

function ClientDialog({ id }) {
  const { data, error } = useApi("/client", { id }, { every: 5000 });
  const row = data?.client;
  const facts = row && [
    ["Kind", row.kind], ["Host", row.hostname], ["Address", row.remote_address], ["Library", row.user_agent],
    ["Node", html`<${A} to=${nodePath(row.node)}>${row.node}</${A}>`],
    row.topic && ["Topic", html`<${A} to=${topicPath(row.topic)}>${row.topic}</${A}>`], row.channel && ["Channel", html`<${A} to=${channelPath(row.topic, row.channel)}>${row.channel}</${A}>`],
    ["Ready for", exact(row.ready)], ["In flight", exact(row.in_flight)], ["Messages", exact(row.message_count)], ["Finished", exact(row.finish_count)], ["Requeued", exact(row.requeue_count)],
    ["Connected", row.connected_at ? html`${clock(row.connected_at)} (<${Ago} at=${row.connected_at} />)` : "–"], ["Connection", secure(row) || "plain"],
    row.auth_identity && ["Identity", row.auth_identity], (row.zone || row.region) && ["Place", [row.region, row.zone].filter(Boolean).join(" / ")],
  ].filter(Boolean);
  return html`<${Dialog} title=${row?.client_id || "Client"} onClose=${() => setQuery({ id: "" })}>
    ${error ? html`<${Failure} error=${error} />` : !row ? html`<${Loading} />` : html`<dl class="facts">${facts.map(([name, value]) => html`<dt>${name}</dt><dd>${value}</dd>`)}</dl>`}</${Dialog}>`;
}
