// Settings of a topic or channel: the value that counts, where it comes from, changed in place.
import { html, useApi, useState, api, may, notify } from "../lib.js";
import { Empty, Failure, Label, Loading, Missing } from "../ui.js";

const HINTS = {
  durability: "What the OK of a publish means: memory, os or fsync",
  "mem-queue-size": "Messages kept in memory",
  "mem-queue-bytes": "Bytes of messages kept in memory, at most",
  "max-messages": "Most messages that it may hold; 0: no limit",
  "max-bytes": "Most bytes of messages that it may hold; 0: no limit",
  "limit-policy": "At its limit: refuse publishes, or drop-oldest",
  "publish-rate": "Most messages a second that may be published; 0: no limit",
  "max-defer": "Longest delay of a deferred or requeued message",
  "retain-bytes": "Bytes of files that are kept though no channel needs them",
  "retain-age": "How long files are kept though no channel needs them",
  ttl: "Messages older than this are not delivered any more; 0: at any age",
  "ttl-action": "What becomes of those: drop, or dead-letter",
  "new-channel": "Where a new channel starts: backlog, earliest or latest",
  "key-count": "Idempotency keys that are remembered; 0: none",
  "key-age": "How long an idempotency key is remembered; 0: for ever",
  "reader-age": "A reader that has not moved for this long is given up; 0: never",
  "reader-bytes": "A reader that holds more bytes of files is given up; 0: never",
  "msg-timeout": "Time a consumer has to finish a message",
  "delivery-rate": "Most messages a second that it delivers; 0: no limit",
  "max-attempts": "Failed attempts after which a message becomes a dead letter; 0: never",
  "dead-letter-topic": "Where dead letters go; empty: a topic of its own",
};
const SOURCES = { live: "set here or over HTTP", file: "from the config file", option: "a flag of nsqd", default: "default" };

export function Settings({ topic, channel }) {
  const { data, error, reload } = useApi("/settings", { topic, channel });
  const [editing, setEditing] = useState(null);
  const [failure, setFailure] = useState(null);
  const save = async (key, value) => {
    setFailure(null);
    try {
      const answer = await api("/settings", { method: "PUT", query: { topic, channel }, body: { [key]: value } });
      const bad = Object.entries(answer.errors || {});
      if (bad.length) notify(bad.map(([node, words]) => `${node}: ${words}`).join("; "), "error");
      else notify(value === null ? `${key} is what file or flags say again.` : `${key} is ${value || "empty"} now.`);
      setEditing(null);
      await reload();
    } catch (problem) { setFailure(problem); }
  };
  if (error) return html`<${Failure} error=${error} retry=${reload} />`;
  if (!data) return html`<${Loading} />`;
  const names = Object.keys(data.settings);
  if (!names.length) return html`<${Empty} title="No node here can tell its settings"><p>Settings of topics and channels are a feature of flintmq's nsqd; NSQ's own has flags only.</p></${Empty}>`;
  return html`<${Missing} nodes=${data.missing} />${data.unsupported?.length ? html`<p class="missing">NSQ's own nsqd has no settings, a change does not reach it: ${data.unsupported.join(", ")}</p>` : null}
    <div class="table-box settings"><table aria-label="settings"><thead><tr><th scope="col">Setting</th><th scope="col">Value</th><th scope="col">From</th><th><span class="sr">Change</span></th></tr></thead><tbody>
    ${names.map((key) => {
      const one = data.settings[key];
      return html`<tr key=${key}><td class="main wrap" data-title="Setting"><span class="mono">${key}</span><span class="hint">${HINTS[key] || ""}</span></td>
        ${editing === key ? html`<td colspan="3"><form class="row" onSubmit=${(event) => { event.preventDefault(); save(key, event.target.value.value.trim()); }}>
            <input name="value" defaultValue=${one.value ?? ""} aria-label=${key} ref=${(input) => input && !input.dataset.seen && (input.dataset.seen = "1", input.focus(), input.select())} onKeyDown=${(event) => { if (event.key === "Escape") setEditing(null); }} />
            <button class="primary">Save</button><button type="button" onClick=${() => setEditing(null)}>Cancel</button></form><${Failure} error=${failure} /></td>`
          : html`<td class="mono" data-title="Value">${one.value === "" || one.value === null ? html`<span class="quiet">empty</span>` : String(one.value)}
            ${one.differs ? html` <${Label} kind="amber" title=${Object.entries(one.differs).map(([node, value]) => `${node}: ${value}`).join("\n")}>differs</${Label}>` : null}</td>
          <td data-title="From">${one.source === "live" ? html`<${Label}>live</${Label}>` : html`<span class="quiet" title=${SOURCES[one.source]}>${one.source}</span>`}</td>
          <td class="num no-title">${may("admin") ? html`<span class="actions">${one.live !== null && one.live !== undefined ? html`<button class="small" onClick=${() => save(key, null)}>Reset</button>` : null}
            <button class="small" aria-label=${`Change ${key}`} onClick=${() => { setFailure(null); setEditing(key); }}>Change</button></span>` : null}</td>`}</tr>`;
    })}</tbody></table></div>
    <p class="quiet">A change has effect at once on all nodes that have it, and survives restarts.</p>`;
}
