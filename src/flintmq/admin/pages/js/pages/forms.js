// Publish a message; create a topic or a channel.
import { html, useApi, useState, api, bytes, notify } from "../lib.js";
import { Dialog, Failure } from "../ui.js";

/** Is it JSON, and if it only looks like it, what is wrong? */
export function judge(text) {
  if (!text.trim()) return { kind: "", words: "empty" };
  try { JSON.parse(text); return { kind: "green", words: "valid JSON", valid: true }; } catch (error) {
    return /^\s*[[{"]/.test(text) ? { kind: "amber", words: `not JSON: ${error.message}` } : { kind: "", words: "text" };
  }
}

export function PublishDialog({ topic, onClose }) {
  const [body, setBody] = useState("");
  const [delay, setDelay] = useState("");
  const [node, setNode] = useState("");
  const [failure, setFailure] = useState(null);
  const [busy, setBusy] = useState(false);
  const { data } = useApi("/nodes", { limit: 200, sort: "node" });
  const checked = judge(body);
  const size = new TextEncoder().encode(body).length;
  const publish = async (event) => {
    event.preventDefault();
    setBusy(true);
    try {
      const answer = await api("/publish", { method: "POST", body: { topic, body, defer: delay ? Math.round(Number(delay) * 1000) : undefined, node: node || undefined } });
      notify(`Published to ${topic} on ${answer.node}${delay ? `, due in ${delay} s` : ""}.`);
      onClose();
    } catch (error) { setFailure(error); } finally { setBusy(false); }
  };
  const format = () => { try { setBody(JSON.stringify(JSON.parse(body), null, 2)); } catch { /* the button is off then */ } };
  return html`<${Dialog} wide title=${`Publish to ${topic}`} onClose=${onClose}><form onSubmit=${publish}>
    <label>Body<textarea name="body" rows="10" spellcheck=${false} value=${body} onInput=${(event) => setBody(event.target.value)} placeholder='{"id": 1}'></textarea></label>
    <p class="row"><span class=${`label ${checked.kind}`} role="status">${checked.words}</span><span class="quiet">${bytes(size)}</span><span class="grow"></span>
      <button type="button" class="small" disabled=${!checked.valid} onClick=${format}>Format</button></p>
    <div class="fields"><label>Deliver after seconds<input name="defer" type="number" min="0" step="any" placeholder="0" value=${delay} onInput=${(event) => setDelay(event.target.value)} /></label>
      <label>Node<select name="node" value=${node} onChange=${(event) => setNode(event.target.value)}><option value="">any that has the topic</option>${(data?.items || []).filter((one) => one.up).map((one) => html`<option key=${one.node} value=${one.node}>${one.hostname || ""} ${one.node}</option>`)}</select></label></div>
    <${Failure} error=${failure} />
    <footer><button class="primary" disabled=${busy || !body}>Publish</button><span class="grow"></span><button type="button" onClick=${onClose}>Cancel</button></footer></form></${Dialog}>`;
}

export function CreateForm({ onDone }) {
  const [failure, setFailure] = useState(null);
  const create = async (event) => {
    event.preventDefault();
    const form = event.target;
    const topic = form.topic.value.trim();
    const channel = form.channel.value.trim();
    try {
      const answer = await api("/actions", { method: "POST", body: { action: channel ? "create_channel" : "create_topic", topic, channel: channel || undefined } });
      notify(answer.message || `Created ${channel ? `${topic}/${channel}` : topic}.`, answer.message ? "error" : "info");
      setFailure(null);
      form.reset();
      onDone?.();
    } catch (error) { setFailure(error); }
  };
  return html`<form class="panel create" onSubmit=${create} aria-label="Create a topic or channel">
    <label>Topic<input name="topic" required maxlength="64" pattern="[.a-zA-Z0-9_\\-]+(#ephemeral)?" title="Letters, digits, dot, dash and underscore" autocomplete="off" /></label>
    <label>Channel <span class="quiet">(may be left empty)</span><input name="channel" maxlength="64" pattern="[.a-zA-Z0-9_\\-]+(#ephemeral)?" title="Letters, digits, dot, dash and underscore" autocomplete="off" /></label>
    <button class="primary">Create</button><${Failure} error=${failure} /></form>`;
}
