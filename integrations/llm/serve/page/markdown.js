// The part of Markdown that models write. Everything becomes text nodes: nothing that a model says is ever HTML.

export function renderMarkdown(text) {
  const into = document.createDocumentFragment();
  const lines = text.split("\n");
  let i = 0;
  while (i < lines.length) {
    const taken = fence(lines, i, into) || heading(lines, i, into) || list(lines, i, into) || table(lines, i, into)
      || quote(lines, i, into) || rule(lines, i, into) || paragraph(lines, i, into);
    i += taken;
  }
  return into;
}

const make = (name, ...children) => {
  const made = document.createElement(name);
  made.append(...children);
  return made;
};

const INLINE = /(`+)(.+?)\1|\*\*(.+?)\*\*|__(.+?)__|\*([^*\s][^*]*)\*|\[([^\]]+)\]\((https?:[^)\s]+)\)|(https?:\/\/[^\s<>)\]]+)/g;

function inline(text) {
  const into = document.createDocumentFragment();
  let end = 0;
  for (const found of text.matchAll(INLINE)) {
    into.append(text.slice(end, found.index));
    end = found.index + found[0].length;
    const [, , code, bold, bold2, italic, label, address, bare] = found;
    if (code !== undefined) into.append(make("code", code));
    else if (bold || bold2) into.append(make("strong", inline(bold || bold2)));
    else if (italic) into.append(make("em", inline(italic)));
    else into.append(link(label || bare, address || bare));
  }
  into.append(text.slice(end));
  return into;
}

function link(label, address) {
  const made = make("a", label);
  made.href = address;
  made.rel = "noopener noreferrer";
  made.target = "_blank";
  return made;
}

function fence(lines, i, into) {
  const mark = lines[i].match(/^\s*(```+|~~~+)/)?.[1];
  if (!mark) return 0;
  let end = i + 1;
  while (end < lines.length && !lines[end].trim().startsWith(mark)) end++;
  const code = lines.slice(i + 1, end).join("\n");
  const copy = make("button", "Copy");
  copy.type = "button";
  copy.onclick = () => navigator.clipboard.writeText(code).then(() => { copy.textContent = "Copied"; });
  into.append(make("pre", copy, make("code", code)));
  return end + 1 - i;
}

function heading(lines, i, into) {
  const found = lines[i].match(/^(#{1,6})\s+(.*)/);
  if (!found) return 0;
  into.append(make(`h${Math.min(6, found[1].length + 2)}`, inline(found[2])));
  return 1;
}

const ITEM = /^(\s*)([-*+]|\d+[.)])\s+(.*)/;

function list(lines, i, into) {
  const first = lines[i].match(ITEM);
  if (!first) return 0;
  const made = make(/\d/.test(first[2]) ? "ol" : "ul");
  if (made.tagName === "OL") made.start = parseInt(first[2], 10);
  let end = i;
  while (end < lines.length) {
    const found = lines[end].match(ITEM);
    if (found && found[1].length > first[1].length && made.lastElementChild) {
      end += list(lines, end, made.lastElementChild);
    } else if (found && found[1].length === first[1].length) {
      made.append(make("li", inline(found[3])));
      end++;
    } else if (!found && lines[end].trim() && /^\s/.test(lines[end]) && made.lastElementChild) {
      made.lastElementChild.append(" ", inline(lines[end].trim()));
      end++;
    } else if (!lines[end].trim() && lines[end + 1]?.match(ITEM)) {
      end++;
    } else break;
  }
  into.append(made);
  return end - i;
}

function table(lines, i, into) {
  if (!lines[i].includes("|") || !/^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/.test(lines[i + 1] || "")) return 0;
  const cells = (line, name) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => make(name, inline(cell.trim())));
  const made = make("table", make("tr", ...cells(lines[i], "th")));
  let end = i + 2;
  while (end < lines.length && lines[end].includes("|")) made.append(make("tr", ...cells(lines[end++], "td")));
  into.append(made);
  return end - i;
}

function quote(lines, i, into) {
  let end = i;
  while (end < lines.length && /^\s*>/.test(lines[end])) end++;
  if (end === i) return 0;
  into.append(make("blockquote", renderMarkdown(lines.slice(i, end).map((line) => line.replace(/^\s*>\s?/, "")).join("\n"))));
  return end - i;
}

function rule(lines, i, into) {
  if (!/^\s*([-*_])(\s*\1){2,}\s*$/.test(lines[i])) return 0;
  into.append(make("hr"));
  return 1;
}

function paragraph(lines, i, into) {
  if (!lines[i].trim()) return 1;
  const made = make("p");
  let end = i;
  while (end < lines.length && lines[end].trim() && (end === i || !/^\s*(```|~~~|#{1,6}\s|>|[-*+]\s|\d+[.)]\s)/.test(lines[end]))) {
    if (end > i) made.append(make("br"));
    made.append(inline(lines[end++]));
  }
  into.append(made);
  return end - i;
}
