// Starts the page: which of its two halves is shown, and what both need of the server.

import { startChat } from "./chat.js";
import { startCluster } from "./cluster.js";

const part = (id) => document.getElementById(id);

function show(name) {
  for (const other of ["chat", "cluster"]) {
    part(other).hidden = other !== name;
    part(`show-${other}`).setAttribute("aria-pressed", String(other === name));
  }
  location.hash = name === "cluster" ? "cluster" : "";
}

part("show-chat").addEventListener("click", () => show("chat"));
part("show-cluster").addEventListener("click", () => show("cluster"));
show(location.hash === "#cluster" ? "cluster" : "chat");

const headers = () => {
  const key = part("key").value;
  return key ? { Authorization: `Bearer ${key}` } : {};
};

part("key").value = localStorage.getItem("hostring.key") || "";
part("key").addEventListener("change", () => localStorage.setItem("hostring.key", part("key").value));

startChat(headers);
startCluster(headers, () => !part("cluster").hidden);
