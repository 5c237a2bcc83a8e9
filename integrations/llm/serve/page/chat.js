// The chat: conversations in the browser's storage, answers as they come.

import { renderMarkdown } from "./markdown.js";
import { readEvents } from "./events.js";

const part = (id) => document.getElementById(id);
const STORE = "hostring.conversations";
const SETTINGS = ["system", "temperature", "top_p", "top_k", "seed", "max_tokens"];

let conversations = [];  // newest first; each has id and messages: role, content, and of answers note, failed, reasoning
let current = null;
let running = null;  // an AbortController while an answer comes
let headers = () => ({});

export function startChat(givenHeaders) {
  headers = givenHeaders;
  restore();
  part("new").addEventListener("click", () => open(null));
  part("menu").addEventListener("click", () => part("conversations").classList.toggle("open"));
  part("stop").addEventListener("click", () => running?.abort());
  part("ask").addEventListener("submit", (event) => { event.preventDefault(); ask(); });
  part("prompt").addEventListener("input", grow);
  part("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); ask(); }
  });
  for (const name of SETTINGS) part(name).addEventListener("change", keepSettings);
  draw();
}

function restore() {
  try { conversations = JSON.parse(localStorage.getItem(STORE)) || []; } catch { conversations = []; }
  const settings = JSON.parse(localStorage.getItem("hostring.settings") || "{}");
  for (const name of SETTINGS) if (settings[name] !== undefined) part(name).value = settings[name];
  current = conversations[0] || null;
}

function keep() {
  while (conversations.length) {
    try { localStorage.setItem(STORE, JSON.stringify(conversations)); return; } catch { conversations.pop(); }  // it is full
  }
  localStorage.removeItem(STORE);
}

function keepSettings() {
  const values = Object.fromEntries(SETTINGS.map((name) => [name, part(name).value]));
  localStorage.setItem("hostring.settings", JSON.stringify(values));
}

function open(conversation) {
  running?.abort();
  current = conversation;
  part("conversations").classList.remove("open");
  draw();
  part("prompt").focus();
}

function grow() {
  const prompt = part("prompt");
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight + 2}px`;
}

function ask() {
  const text = part("prompt").value.trim();
  if (!text || running) return;
  part("prompt").value = "";
  grow();
  if (!current) {
    current = { id: String(Date.now()), messages: [] };
    conversations.unshift(current);
  }
  current.messages.push({ role: "user", content: text });
  answer();
}

function body(messages) {
  const said = messages.filter((message) => message.content || message.role === "user")
    .map(({ role, content }) => ({ role, content }));
  const system = part("system").value.trim();
  const asked = { messages: system ? [{ role: "system", content: system }, ...said] : said, stream: true };
  for (const name of SETTINGS.slice(1)) if (part(name).value !== "") asked[name] = Number(part(name).value);
  return { ...asked, stream_options: { include_usage: true } };
}

async function answer() {
  const conversation = current;
  const request = JSON.stringify(body(conversation.messages));
  const message = { role: "assistant", content: "", reasoning: "" };
  conversation.messages.push(message);
  running = new AbortController();
  draw();
  const began = performance.now();
  let first = 0;
  try {
    const response = await fetch("v1/chat/completions", {
      method: "POST", body: request, signal: running.signal,
      headers: { "Content-Type": "application/json", ...headers() },
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const chunk of readEvents(response.body)) {
      const delta = chunk.choices?.[0]?.delta || {};
      message.content += delta.content || "";
      message.reasoning += delta.reasoning_content || "";
      if (!first && (delta.content || delta.reasoning_content)) first = performance.now();
      if (chunk.usage) note(message, chunk.usage.completion_tokens, began, first);
      drawLast(conversation, message);
    }
  } catch (error) {
    if (error.name !== "AbortError") message.failed = error.message;
    else message.note = "stopped";
  } finally {
    running = null;
    keep();
    draw();
  }
}

function note(message, tokens, began, first) {
  const rate = (tokens - 1) / ((performance.now() - first) / 1000);
  const speed = tokens > 1 && Number.isFinite(rate) ? `, ${rate.toFixed(1)} tokens/s` : "";
  message.note = `${tokens} tokens${speed}, first after ${((first - began) / 1000).toFixed(2)} s`;
}

function again(index) {
  if (running) return;
  current.messages.length = index;
  answer();
}

function edit(index) {
  if (running) return;
  part("prompt").value = current.messages[index].content;
  current.messages.length = index;
  keep();
  draw();
  grow();
  part("prompt").focus();
}

function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

function drawMessage(message, index) {
  const mine = message.role === "user";
  const tool = mine
    ? element("button", { className: "quiet", textContent: "Edit", onclick: () => edit(index) })
    : element("button", { className: "quiet", textContent: "Again", onclick: () => again(index) });
  const who = element("div", { className: "who" }, mine ? "You" : "Model", tool,
    element("span", { className: "note", textContent: message.note || "" }));
  const text = element("div", { className: "text" });
  if (mine) text.textContent = message.content;
  else text.append(renderMarkdown(message.content));
  const made = element("div", { className: `message ${message.role}` }, who);
  if (message.reasoning) made.append(element("details", {}, element("summary", { textContent: "Thoughts" }), message.reasoning));
  made.append(text);
  if (message.failed) made.append(element("div", { className: "failed", textContent: message.failed }));
  return made;
}

function drawLast(conversation, message) {
  if (conversation !== current) return;
  const box = part("messages");
  const atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 60;
  box.lastElementChild?.replaceWith(drawMessage(message, conversation.messages.length - 1));
  if (atEnd) box.scrollTop = box.scrollHeight;
}

function draw() {
  part("send").hidden = Boolean(running);
  part("stop").hidden = !running;
  const messages = current ? current.messages : [];
  const shown = messages.length ? messages.map(drawMessage)
    : [element("p", { className: "empty", textContent: "One model, several machines. Ask it something." })];
  part("messages").replaceChildren(...shown);
  part("messages").scrollTop = part("messages").scrollHeight;
  part("list").replaceChildren(...conversations.map((one) => element("li", { className: one === current ? "current" : "" },
    element("button", { textContent: one.messages[0]?.content || "(empty)", onclick: () => open(one) }),
    element("button", { className: "quiet", textContent: "×", title: "Delete", ariaLabel: "Delete", onclick: () => remove(one) }))));
}

function remove(conversation) {
  conversations = conversations.filter((one) => one !== conversation);
  keep();
  open(conversation === current ? conversations[0] || null : current);
}
