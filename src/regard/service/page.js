"use strict";

// What is shown is text, never markup: elements are made here, and their words are set as text.

const KNOWN = JSON.parse(document.getElementById("known").textContent);
const SHADES = 64; // of /colours.css
const MOST_CELLS = 4096; // of a table; beyond this a picture is shown
const HINT = "Point at a word, or move through the words with the arrow keys.";
const POINT = "Point at a token, or move through the tokens with the arrow keys.";

// ------------------------------------------------------------------------------------- elements

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child != null));
  return element;
}

function shade(element, value, most) {
  const step = most > 0 ? Math.min(Math.max(value / most, 0), 1) : 0;
  const number = Math.round(step * (SHADES - 1));
  element.style.setProperty("--shade", `var(--s${number})`);
  element.style.setProperty("--on", `var(--o${number})`);
  return element;
}

function share(element, value) {
  element.style.setProperty("--share", value);
  return element;
}

/** A weight in two digits, as pictures in a terminal have it: .94, 1.00, and a point for 0. */
function brief(value) {
  if (value == null) return "";
  const text = value.toFixed(2);
  return text === "0.00" ? "." : text.replace(/^0/, "");
}

const most = (rows) => rows.flat().reduce((a, b) => Math.max(a, b ?? 0), 0);
const facts = (...parts) => make("p", { class: "facts" }, parts.filter(Boolean).join(" · "));
const seconds = (value) => `${value < 10 ? value.toFixed(2) : Math.round(value)} s`;
const counted = (count, name) => `${count.toLocaleString("en")} ${name}${count === 1 ? "" : "s"}`;

// ------------------------------------------------------------------------------ words in a text

/** Where units (words, sentences) stand in a text, in order; null where they are not all there.
    They hold all of its letters between the first and the last, so blank space can be left out. */
function placesOf(text, units) {
  const bare = (one) => one.replace(/\s+/g, "");
  const at = [];
  for (let i = 0; i < text.length; i++) if (!/\s/.test(text[i])) at.push(i);
  let next = bare(text).indexOf(bare(units.join("")));
  if (next < 0 || !units.length) return null;
  return units.map((unit) => {
    const first = next;
    next += bare(unit).length;
    return [at[first], at[next - 1] + 1];
  });
}

/** A text as an element, with a span for each of its units; `marked` is a part of it to underline,
    and what is before `quiet` is said more quietly. */
function textOf(text, units, { marked = null, quiet = 0 } = {}) {
  const long = text.length > 240;
  const element = make("p", { class: long ? "text long" : "text" });
  const spans = units.map((unit) => make("span", { class: "unit" }, unit));
  const places = placesOf(text, units);
  if (!places) {
    element.append(...spans.flatMap((span) => [span, " "]));
    return { element, spans };
  }
  let mark = null;
  const put = (node, start, end) => {
    let home = element;
    if (marked && start < marked[1] && end > marked[0]) {
      if (!mark) element.append((mark = make("mark")));
      home = mark;
    }
    if (end <= quiet) node.classList?.add("prompt");
    home.append(node);
  };
  let done = 0;
  const between = (end) => {
    if (end <= done) return;
    // Blank space on an edge of what is marked is not of it.
    const inside = marked && done >= marked[0] && end <= marked[1];
    if (inside) put(document.createTextNode(text.slice(done, end)), done, end);
    else element.append(document.createTextNode(text.slice(done, end)));
  };
  places.forEach(([start, end], index) => {
    between(start);
    spans[index].textContent = text.slice(start, end);
    put(spans[index], start, end);
    done = end;
  });
  between(text.length);
  return { element, spans };
}

/** Tokens, each by itself. */
function chipsOf(tokens) {
  const spans = tokens.map((token) => make("span", { class: "unit" }, token));
  return { element: make("p", { class: "chips" }, ...spans), spans };
}

// ---------------------------------------------------------------------- who looked at what

/** Lets one point at units: those they looked at are lit, and said below.
    `asking` and `asked` are lists of spans, `weights` is [asking][asked]. */
function linked({ asking, asked, names, weights, label, hint = HINT, table = null, both = true }) {
  const said = make("p", { class: "looked", role: "status" }, hint);
  const column = (j) => weights.map((row) => row[j]);
  const all = new Set([...asking, ...asked]);
  let pinned = null;

  function clear() {
    for (const span of all) {
      span.classList.remove("lit", "here");
      if (span.hasAttribute("aria-pressed")) span.setAttribute("aria-pressed", "false");
    }
    table?.here(null);
  }

  function show(choice) {
    clear();
    if (!choice) return said.replaceChildren(hint);
    const { index, back } = choice;
    const row = back ? column(index) : weights[index];
    const others = back ? asking : asked;
    const otherNames = back ? names.asking : names.asked;
    const top = Math.max(...row, 0);
    row.forEach((weight, j) => {
      if (weight > 0.05 * top) {
        others[j].classList.add("lit");
        shade(others[j], weight, top);
      }
    });
    const here = (back ? asked : asking)[index];
    here.classList.add("here");
    if (choice === pinned) here.setAttribute("aria-pressed", "true");
    if (!back) table?.here(index);
    const best = row.map((_, j) => j).sort((a, b) => row[b] - row[a]).slice(0, 3);
    said.replaceChildren(
      make("span", {}, make("b", {}, (back ? names.asked : names.asking)[index]),
        back ? " was looked at by" : " looked at"),
      ...best.filter((j) => row[j] >= 0.005).map((j) => make("span", { class: "key" },
        make("span", {}, otherNames[j]), share(make("i", { "aria-hidden": "true" }), row[j] / top),
        make("span", { class: "number" }, row[j].toFixed(2)))),
    );
  }

  function offer(spans, back) {
    spans.forEach((span, index) => {
      const choice = { index, back };
      span.tabIndex = index ? -1 : 0;
      span.setAttribute("role", "button");
      span.setAttribute("aria-pressed", "false");
      span.addEventListener("mouseenter", () => show(choice));
      span.addEventListener("mouseleave", () => show(pinned));
      span.addEventListener("focus", () => show(choice));
      span.addEventListener("blur", () => show(pinned));
      const pin = () => {
        pinned = pinned?.index === index && pinned.back === back ? null : choice;
        show(pinned ?? choice);
      };
      span.addEventListener("click", pin);
      span.addEventListener("keydown", (event) => {
        const last = spans.length - 1;
        const to = { ArrowRight: Math.min(index + 1, last), ArrowLeft: Math.max(index - 1, 0),
          Home: 0, End: last }[event.key];
        if (to !== undefined) {
          span.tabIndex = -1;
          spans[to].tabIndex = 0;
          spans[to].focus();
        } else if (event.key === "Enter" || event.key === " ") pin();
        else if (event.key === "Escape") show((pinned = null));
        else return;
        event.preventDefault();
      });
    });
    spans[0]?.parentElement.closest("p")?.setAttribute("role", "group");
    spans[0]?.parentElement.closest("p")?.setAttribute("aria-label", label[back ? 1 : 0]);
  }

  offer(asking, false);
  if (both) offer(asked, true);
  table?.point((index) => show(index === null ? pinned : { index, back: false }));
  return said;
}

/** Weights as a table in colours; `out` leaves the first column out of it. */
function weightTable(queries, keys, weights, { mark = false, out = false } = {}) {
  const top = most(out ? weights.map((row) => row.slice(1)) : weights);
  const tall = keys.length > 12 || keys.some((key) => key.length > 8);
  const short = (name) => (name.length > 40 ? `${name.slice(0, 39)}…` : name);
  const rows = weights.map((row, i) => {
    const best = row.indexOf(Math.max(...row));
    return make("tr", {},
      make("th", { scope: "row", title: queries[i] }, short(queries[i])),
      ...row.map((weight, j) => {
        const gone = out && j === 0;
        const cell = make("td", { class: gone ? "out" : mark && j === best && weight > 0 ? "best" : null,
          title: `${queries[i]} → ${keys[j]}: ${weight.toPrecision(3)}` }, brief(weight));
        return gone ? cell : shade(cell, weight, top);
      }));
  });
  const head = make("tr", {}, make("td"), ...keys.map((key) =>
    make("th", { scope: "col", class: tall ? "tall" : null, title: key }, make("span", {}, short(key)))));
  const table = make("table", { class: "map" }, make("thead", {}, head), make("tbody", {}, ...rows));
  const ramp = make("i", { "aria-hidden": "true" },
    ...Array.from({ length: 16 }, (_, i) => shade(make("b"), i, 15)));
  const element = make("div", {},
    make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Weights" }, table),
    make("div", { class: "scale" }, "0", ramp, `${Number(top.toPrecision(3))} weight`));
  return {
    element,
    here: (index) => rows.forEach((row, i) => row.classList.toggle("here", i === index)),
    point: (tell) => rows.forEach((row, i) => {
      row.addEventListener("mouseenter", () => tell(i));
      row.addEventListener("mouseleave", () => tell(null));
    }),
  };
}

/** The card with the weights of a record, or with its picture where they are many. */
function weightsCard(attended, title, svg) {
  const many = attended.queries.length * attended.keys.length > MOST_CELLS;
  const table = many ? null : weightTable(attended.queries, attended.keys, attended.weights, { mark: true });
  const rest = 1 - attended.weights.flat().reduce((a, b) => a + b, 0) / attended.weights.length;
  const said = `${attended.where}. ${Math.round(Math.max(rest, 0) * 100)}% of the weight is on what is no word.`;
  const [down, across] = attended.sides;
  return {
    table,
    card: make("section", { class: "card", "aria-label": title },
      make("h3", {}, title), make("p", { class: "name" }, `${down} down, ${across} across`),
      many ? pictureOf(svg, title) : table.element, make("p", { class: "caption" }, said)),
  };
}

function pictureOf(svg, title) {
  const source = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(svg)}`;
  return make("img", { class: "picture", src: source, alt: title });
}

/** How to have the same elsewhere: the picture as a file, and the request from a terminal. */
function more(view, path, body, svg) {
  const { svg: _, stream: __, ...asked } = body;
  const json = JSON.stringify(asked).replaceAll("'", "'\\''");
  const line = `curl -s --json '${json}' ${location.origin}${path}`;
  const file = svg && URL.createObjectURL(new Blob([svg], { type: "image/svg+xml" }));
  return make("div", { class: "more" },
    svg ? make("a", { href: file, download: `${view}.svg` }, "Save the picture (SVG)") : null,
    make("details", {}, make("summary", {}, "The same from a terminal"), make("pre", {}, line)));
}

// ---------------------------------------------------------------------------------------- views

/** Each view: what its button does while it runs, and how its record is shown. `run` is given what
    the form says and a signal, and puts what it finds into `out`. */
const VIEWS = {
  translate: {
    doing: "Translating",
    async run(body, signal, out) {
      const record = await ask("/translate", { ...body, svg: true }, signal);
      const { attended } = record;
      const target = textOf(record.text, attended?.queries ?? []);
      const source = textOf(record.source, attended?.keys ?? []);
      const cards = [];
      const card = make("div", { class: "card" },
        make("p", { class: "name" }, "Translation"), target.element,
        make("p", { class: "name" }, "Source"), source.element);
      if (attended) {
        const weights = weightsCard(attended, "Alignment", record.svg);
        card.append(linked({
          asking: target.spans, asked: source.spans, weights: attended.weights, table: weights.table,
          names: { asking: attended.queries, asked: attended.keys },
          label: ["Words of the translation", "Words of the source"],
        }));
        cards.push(weights.card);
      }
      card.append(told(record));
      out.replaceChildren(card, ...cards, more("translate", "/translate", body, record.svg));
    },
  },

  summarize: {
    doing: "Summarizing",
    async run(body, signal, out) {
      const record = await ask("/summarize", { ...body, svg: true }, signal);
      const { attended } = record;
      const summary = textOf(record.text, attended?.queries ?? []);
      const document = textOf(body.text, attended?.keys ?? []);
      const cards = [];
      const card = make("div", { class: "card" },
        make("p", { class: "name" }, "Summary"), summary.element,
        make("p", { class: "name" }, "Document"), document.element);
      if (attended) {
        const weights = weightsCard(attended, "Where it comes from", record.svg);
        card.append(linked({
          asking: summary.spans, asked: document.spans, weights: attended.weights, table: weights.table,
          names: { asking: attended.queries, asked: attended.keys },
          label: ["Sentences of the summary", "Sentences of the document"],
          hint: "Point at a sentence, or move through the sentences with the arrow keys.",
        }));
        cards.push(weights.card);
      }
      const parts = record.how === "whole" ? "" : `${counted(record.parts.length, "part")}, ${
        record.how === "again" ? "summarized once more" : "joined"}`;
      card.append(told(record, parts));
      out.replaceChildren(card, ...cards, more("summarize", "/summarize", body, record.svg));
    },
  },

  answer: {
    doing: "Answering",
    async run(body, signal, out) {
      const record = await ask("/answer", { ...body, svg: true }, signal);
      const { attended } = record;
      // The record counts letters; this language counts halves of some.
      const upTo = (count) => Array.from(body.context).slice(0, count).join("").length;
      const marked = record.answered ? [upTo(record.start), upTo(record.end)] : null;
      const question = textOf(record.question, attended?.queries ?? []);
      const context = textOf(body.context, attended?.keys ?? [], { marked });
      const cards = [];
      const card = make("div", { class: "card" },
        make("p", { class: "name" }, "Answer"),
        make("p", { class: record.answered ? "text found" : "text prompt" },
          record.answered ? record.text : "No answer in this context."),
        make("p", { class: "name" }, "Question"), question.element,
        make("p", { class: "name" }, "Context"), context.element);
      if (attended) {
        const weights = weightsCard(attended, "What the question attended to", record.svg);
        card.append(linked({
          asking: question.spans, asked: context.spans, weights: attended.weights, table: weights.table,
          names: { asking: attended.queries, asked: attended.keys },
          label: ["Words of the question", "Words of the context"],
        }));
        cards.push(weights.card);
      }
      card.append(facts(`probability ${record.probability.toFixed(2)}`,
        record.windows > 1 ? counted(record.windows, "window") : "", seconds(record.seconds), record.model));
      out.replaceChildren(card, ...cards, more("answer", "/answer", body, record.svg));
    },
  },

  complete: {
    doing: "Writing",
    async run(body, signal, out) {
      const written = make("span", { class: "caret" });
      const growing = make("p", { class: "text", "aria-busy": "true" },
        make("span", { class: "prompt" }, body.text), written);
      out.replaceChildren(make("div", { class: "card" }, growing));
      let record = null;
      try {
        for await (const line of lines("/complete", { ...body, stream: true, svg: true }, signal)) {
          if (line.piece !== undefined) written.append(line.piece);
          record = line.record ?? record;
        }
      } finally {
        written.classList.remove("caret");
        growing.removeAttribute("aria-busy");
      }
      const { attended } = record;
      const whole = record.prompt + record.text;
      const text = textOf(whole, attended?.keys ?? [], { quiet: record.prompt.length });
      if (!attended) text.element.replaceChildren(make("span", { class: "prompt" }, record.prompt), record.text);
      const cards = [];
      const card = make("div", { class: "card" }, text.element);
      if (attended) {
        const weights = weightsCard(attended, "What was attended to", record.svg);
        card.append(linked({
          asking: text.spans.slice(-attended.queries.length), asked: text.spans,
          weights: attended.weights, table: weights.table, both: false,
          names: { asking: attended.queries, asked: attended.keys },
          label: ["The text; its new words can be pointed at"],
          hint: "Point at a new word, or move through them with the arrow keys.",
        }));
        cards.push(weights.card);
      }
      card.append(told(record, record.stopped ? "it came to an end" : ""));
      out.replaceChildren(card, ...cards, more("complete", "/complete", body, record.svg));
    },
  },

  look: {
    doing: "Looking",
    async run(body, signal, out) {
      const { layer, head, ...whole } = body;
      const key = JSON.stringify(whole);
      if (this.key !== key || !out.firstChild) {
        this.key = null;
        const overview = await ask("/look", whole, signal);
        out.replaceChildren(overviewCards(overview), make("div", { class: "head" }));
        this.key = key;
      }
      const chosen = layer === undefined ? null : `${layer}.${head}`;
      for (const button of out.querySelectorAll(".measure button")) {
        button.setAttribute("aria-pressed", String(button.dataset.head === chosen));
      }
      const place = out.querySelector(".head");
      if (chosen === null) return place.replaceChildren();
      const map = await ask("/look", { ...body, svg: true }, signal);
      place.replaceChildren(...headCards(map), more("look", "/look", body, map.svg));
      place.firstChild.scrollIntoView({ block: "nearest" });
    },
  },

  explain: {
    doing: "Explaining",
    async run(body, signal, out) {
      const trace = await ask("/explain", body, signal);
      const chips = trace.tokens.map((token) => make("button", { type: "button", class: "quiet",
        "aria-pressed": String(token === trace.word),
        onclick: () => go("explain", { ...read(formOf("explain")), word: token }) }, token));
      const heads = counted(trace.heads, "head");
      out.replaceChildren(
        make("div", { class: "card" },
          make("h3", {}, `How attention reads “${trace.tokens.join(" ")}”`),
          facts(trace.subject, counted(trace.tokens.length, trace.subject ? "token" : "word"), heads,
            `queries and keys of ${trace.dim} numbers`),
          make("p", { class: "name follow" }, "Followed closely"),
          make("div", { class: "chips chosen" }, ...chips)),
        make("ol", { class: "steps" }, ...trace.steps.map((step, i) => stepOf(step, i + 1, trace))),
        make("div", { class: "card check" },
          make("h3", {}, trace.agreement.holds ? "✓ Check" : "✗ Check"),
          make("p", { class: "says" }, `${trace.subject ? "The model itself" : "regard.attention()"} computes all of this at once (here with “${
            trace.agreement.backend}”). Largest difference: ${trace.agreement.difference.toExponential(1)}, ${
            trace.agreement.holds ? "within" : "MORE THAN"} the tolerance of ${trace.agreement.tolerance.toExponential(1)}.`)),
        more("explain", "/explain", body, null));
    },
  },
};

const told = (record, extra = "") =>
  facts(extra, `score ${record.score.toFixed(2).replace("-", "−")}`, counted(record.tokens, "token"), seconds(record.seconds), record.model);

function overviewCards(overview) {
  const panels = Object.entries(overview.values).map(([name, rows]) => {
    const top = most(rows);
    const measure = KNOWN.measures[name];
    const measured = rows.some((row) => row.some((value) => value !== null));
    if (!measured) {
      return make("section", { class: "card measure" }, make("h3", {}, measure.title),
        make("p", {}, `Nothing here to measure ${measure.meaning}.`));
    }
    const body = rows.map((row, i) => make("tr", {}, make("th", { scope: "row" }, overview.layers[i]),
      ...row.map((value, j) => make("td", {}, value === null ? "" : shade(make("button", {
        type: "button", "aria-pressed": "false", "data-head": `${overview.layers[i]}.${j}`,
        "aria-label": `Layer ${overview.layers[i]}, head ${j}: ${value.toPrecision(3)} ${measure.unit}. See its map.`,
        onclick: () => go("look", { ...read(formOf("look")), layer: overview.layers[i], head: String(j) }),
      }, measure.unit === "of the weight" ? brief(value) : value.toFixed(value < 10 ? 2 : 0)), value, top)))));
    const heads = make("tr", {}, make("td"), ...rows[0].map((_, j) => make("th", { scope: "col" }, String(j))));
    return make("section", { class: "card measure" }, make("h3", {}, measure.title),
      make("p", {}, `${measure.meaning[0].toUpperCase()}${measure.meaning.slice(1)}, ${measure.unit === "of the weight" ? "share of the weight" : `in ${measure.unit}`}`),
      make("div", { class: "scroll" }, make("table", {}, make("thead", {}, heads), make("tbody", {}, ...body))));
  });
  return make("div", {},
    make("p", { class: "facts" }, [`${overview.model}, ${counted(overview.tokens, "token")}: layers down, heads across.`,
      ...overview.notes].join(" ")),
    make("div", { class: "measures" }, ...panels));
}

function headCards(map) {
  const title = `${map.model}: layer ${map.layer}, head ${map.head}`;
  if (map.pooled || map.queries.length * map.keys.length > MOST_CELLS) {
    return [make("section", { class: "card", "aria-label": title }, pictureOf(map.svg, title))];
  }
  const across = map.layer.startsWith("cross");
  const holder = make("section", { class: "card", "aria-label": title });
  const tick = make("input", { type: "checkbox", onchange: () => draw() });
  function draw() {
    const out = tick.checked;
    const weights = out ? map.weights.map((row) => [0, ...row.slice(1)]) : map.weights;
    const table = weightTable(map.queries, map.keys, map.weights, { out });
    const asking = chipsOf(map.queries);
    const asked = across ? chipsOf(map.keys) : asking;
    const said = linked({
      asking: asking.spans, asked: asked.spans, weights, table, both: across, hint: POINT,
      names: { asking: map.queries, asked: map.keys }, label: ["Tokens that ask", "Tokens that are asked"],
    });
    const tokens = across
      ? [make("p", { class: "name" }, "Written"), asking.element, make("p", { class: "name" }, "Read"), asked.element]
      : [asking.element];
    holder.replaceChildren(
      make("div", { class: "bar" }, make("h3", {}, title),
        make("label", { class: "tick" }, tick, "Leave out the first token")),
      make("p", { class: "name" }, "query down, key across"),
      ...tokens, said, table.element,
      ...(map.notes.length ? [make("p", { class: "caption" }, map.notes.join(" "))] : []));
  }
  draw();
  return [holder];
}

// -------------------------------------------------------------------------------------- explain

const MOST_HEADS = 4;
const MOST_WEIGHTS = 16; // of a matrix W that is shown; larger ones are only multiplied with
const MOST_FEATURES = 8; // columns that are no words
const MOST_ROWS = 24;

function stepOf(step, number, trace) {
  const focus = trace.tokens.indexOf(trace.word);
  const tables = [];
  let bars = null;
  for (const numbers of step.numbers) {
    const deep = numbers.shape.length === 3;
    if (numbers.symbol.startsWith("W_") && numbers.values.flat().length > MOST_WEIGHTS) continue;
    (deep ? numbers.values.slice(0, MOST_HEADS) : [numbers.values]).forEach((matrix, head) => {
      const name = deep && trace.heads > 1 ? `${numbers.symbol}, ${trace.shown[head]}` : numbers.symbol;
      tables.push(numbersTable(name, numbers, matrix, trace, focus));
    });
    if (numbers.symbol === "A" && trace.shown.length === 1) {
      bars = barsOf(`${trace.word} looks at`, numbers.columns, numbers.values[0][focus]);
    }
  }
  const notes = step.notes.length ? make("pre", {}, step.notes.join("\n")) : null;
  return make("li", { class: "card" },
    make("h3", {}, make("span", { "aria-hidden": "true" }, String(number)), step.name),
    make("p", { class: "formula" }, step.formula), make("p", { class: "says" }, step.sentence),
    tables.length ? make("div", { class: "tables" }, ...tables) : null, notes, bars);
}

function numbersTable(name, numbers, matrix, trace, focus) {
  const words = numbers.columns.length === trace.tokens.length || numbers.symbol.startsWith("weights of");
  const kept = words ? MOST_ROWS : MOST_FEATURES;
  const asks = numbers.rows.length === trace.tokens.length && !["K", "V"].includes(numbers.symbol);
  const cut = numbers.columns.length > kept;
  const decimals = [0, 1, 2].find((count) => matrix.flat().every((value) =>
    value === null || Math.abs(value * 10 ** count - Math.round(value * 10 ** count)) < 1e-4)) ?? 3;
  const weights = numbers.symbol === "A";
  const rows = matrix.slice(0, MOST_ROWS).map((row, i) => make("tr", { class: asks && i === focus ? "followed" : null },
    make("th", { scope: "row" }, numbers.rows[i]),
    ...row.slice(0, kept).map((value) => {
      const cell = make("td", {}, value === null ? "−∞" : value.toFixed(decimals).replace("-", "−"));
      return weights ? shade(cell, value ?? 0, 1) : cell;
    }),
    cut ? make("td", {}, "…") : null));
  const left = matrix.length - rows.length;
  const head = make("tr", {}, make("td"),
    ...numbers.columns.slice(0, kept).map((column) => make("th", { scope: "col" }, column)), cut ? make("th", {}, "…") : null);
  const shape = `${matrix.length} × ${numbers.columns.length}`;
  return make("div", {}, make("div", { class: "scroll" }, make("table", { class: weights ? "map" : "plain" },
    make("caption", {}, name, make("span", { class: "name" }, `  ${shape}${left > 0 ? `, ${left} rows not shown` : ""}`)),
    make("thead", {}, head), make("tbody", {}, ...rows))));
}

function barsOf(title, names, values) {
  const top = Math.max(...values.map((value) => value ?? 0));
  return make("div", {}, make("p", { class: "name follow" }, title),
    make("div", { class: "bars" }, ...names.flatMap((name, i) => [
      make("span", {}, name), make("span", {}, (values[i] ?? 0).toFixed(3)),
      share(make("i", { "aria-hidden": "true" }), (values[i] ?? 0) / top)])));
}

// --------------------------------------------------------------------------------------- asking

async function post(path, body, signal) {
  let response;
  try {
    response = await fetch(path, {
      method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal,
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server does not answer. Is regard serve still running?");
  }
  if (response.ok) return response;
  const said = await response.json().catch(() => null);
  throw new Error(said?.error?.message ?? `The server answered with status ${response.status}.`);
}

const ask = async (path, body, signal) => (await post(path, body, signal)).json();

/** What a path streams: a JSON object a line. */
async function* lines(path, body, signal) {
  const stream = (await post(path, body, signal)).body.pipeThrough(new TextDecoderStream());
  const reader = stream.getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) break;
    const parts = (rest + value).split("\n");
    rest = parts.pop();
    for (const part of parts) {
      const line = JSON.parse(part);
      if (line.error) throw new Error(line.error.message);
      yield line;
    }
  }
  if (rest) throw new Error("The server stopped in the middle. Is regard serve still running?");
}

// ------------------------------------------------------------------------- forms and the address

const sectionOf = (view) => document.querySelector(`[data-view=${view}]`);
const formOf = (view) => sectionOf(view).querySelector("form");

/** What a form says, as texts by name; what is empty or of no use now is left out. */
function read(form) {
  const said = {};
  for (const field of form.elements) {
    if (!field.name || field.disabled) continue;
    const value = field.type === "checkbox" ? (field.checked ? "true" : "") : field.value;
    if (value !== "") said[field.name] = value;
  }
  return said;
}

/** The same as the server takes it. */
function bodyOf(said) {
  const numbers = ["length", "temperature", "seed", "head", "heads"];
  return Object.fromEntries(Object.entries(said).map(([name, value]) =>
    [name, numbers.includes(name) ? Number(value) : name === "causal" ? true : value]));
}

function fill(form, said) {
  form.reset();
  for (const field of form.elements) if (field.type === "hidden") field.value = "";
  if (form.elements.model && said.model !== undefined) choose(form.elements.model, said.model);
  adapt(form);
  for (const field of form.elements) {
    if (!field.name || !(field.name in said) || field.disabled) continue;
    if (field.type === "checkbox") field.checked = said[field.name] === "true";
    else if (field.tagName === "SELECT") choose(field, said[field.name]);
    else field.value = said[field.name];
  }
}

/** What a link asks for is asked for, though it be no choice here: the server says what is wrong. */
function choose(select, value) {
  if (![...select.options].some((option) => option.value === value)) select.append(make("option", { value }, value));
  select.value = value;
}

let models = [];

/** Shows the fields that go with the model chosen. */
function adapt(form) {
  const view = form.closest("section").dataset.view;
  const model = models.find((one) => one.name === form.elements.model.value);
  if (view === "translate") {
    const [select, input] = form.querySelectorAll("[name=to]");
    const languages = model?.languages ?? [];
    const names = new Intl.DisplayNames(["en"], { type: "language" });
    const before = select.value || "fr";
    select.replaceChildren(...languages.map((one) => make("option", { value: one }, names.of(one))));
    if (languages.includes(before)) select.value = before;
    for (const [field, shown] of [[select, languages.length > 0], [input, !languages.length]]) {
      field.hidden = field.disabled = !shown;
    }
  }
  if (view === "explain") {
    const made = form.elements.model.value === "";
    for (const [name, shown] of [[".of-model", !made], [".of-nobody", made]]) {
      for (const label of form.querySelectorAll(name)) {
        label.hidden = !shown;
        label.querySelector("input").disabled = !shown;
      }
    }
    form.elements.sentence.required = !made;
  }
}

const running = {}; // by view: how to stop what runs
const shown = {}; // by view: the address of what is shown

function go(view, said) {
  const address = `#${view}?${new URLSearchParams(said)}`;
  if (location.hash === address) arrive(true);
  else location.hash = address;
}

/** Shows the part of the page that the address names, and tells what it asks of it. */
function turn() {
  const [name, query] = location.hash.slice(1).split(/\?(.*)/s);
  const view = name in VIEWS ? name : "translate";
  for (const section of document.querySelectorAll("main > section")) section.hidden = section.dataset.view !== view;
  for (const link of document.querySelectorAll("nav a")) {
    const here = link.getAttribute("href").split("?")[0] === `#${view}`;
    if (here) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `${view[0].toUpperCase()}${view.slice(1)} · regard`;
  return [view, query];
}

/** Shows what the address asks for. */
function arrive(again = false) {
  if (location.hash === "#main") return;
  const [view, query] = turn();
  if (query === undefined) {
    if (view === "explain" && !shown.explain) run(view); // it needs no model, and nothing to be typed
    return;
  }
  if (!again && shown[view] === location.hash) return;
  fill(formOf(view), Object.fromEntries(new URLSearchParams(query)));
  run(view);
}

async function run(view) {
  running[view]?.();
  const section = sectionOf(view);
  const state = section.querySelector(".state");
  const out = section.querySelector(".result");
  const control = new AbortController();
  const began = performance.now();
  const passed = make("span", { "aria-hidden": "true" });
  const tick = setInterval(() => (passed.textContent = seconds(Math.round((performance.now() - began) / 1000))), 1000);
  const stop = () => {
    control.abort();
    clearInterval(tick);
    state.replaceChildren();
    delete running[view];
  };
  running[view] = stop;
  state.replaceChildren(make("div", { class: "busy", role: "status" }, `${VIEWS[view].doing} …`,
    make("progress", { "aria-label": VIEWS[view].doing }), passed,
    make("button", { type: "button", class: "quiet", onclick: stop }, "Stop")));
  section.setAttribute("aria-busy", "true");
  const address = location.hash;
  document.querySelector(`nav a[href^="#${view}"]`).href = address.includes("?") ? address : `#${view}`;
  try {
    await VIEWS[view].run(bodyOf(read(formOf(view))), control.signal, out);
    shown[view] = address;
    if (running[view] === stop) stop();
  } catch (error) {
    delete shown[view];
    if (error.name === "AbortError") return;
    stop();
    if (view !== "complete" && view !== "look") out.replaceChildren();
    state.replaceChildren(make("p", { class: "error", role: "alert" }, error.message));
  } finally {
    clearInterval(tick);
    if (!running[view]) section.removeAttribute("aria-busy");
  }
}

// ---------------------------------------------------------------------------------------- start

async function start() {
  document.getElementById("version").textContent = KNOWN.version;
  turn();
  try {
    models = (await (await fetch("/models")).json()).models;
  } catch {
    models = []; // each request says that the server does not answer
  }
  for (const view of Object.keys(VIEWS)) {
    const form = formOf(view);
    const able = models.filter((model) => model.can.includes(view));
    for (const model of able) {
      const size = model.parameters ? `, ${(model.parameters / 1e6).toFixed(1)} M parameters` : "";
      const option = make("option", { value: model.name, title: `${model.architecture}${size}, ${model.licence || "licence unknown"}` },
        view === "look" || view === "explain" ? `${model.name} (${model.architecture.split(" ")[0]})` : model.name);
      option.defaultSelected = view === "look" && model.name === "books-gpt2";
      form.elements.model.append(option);
    }
    form.reset();
    adapt(form);
    form.elements.model.addEventListener("change", () => adapt(form));
    form.addEventListener("input", (event) => {
      // Another text or model has other heads and other words.
      if (event.target.type !== "hidden") for (const field of form.querySelectorAll("[type=hidden]")) field.value = "";
    });
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      go(view, read(form));
    });
    form.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
    });
  }
  addEventListener("hashchange", () => arrive());
  document.getElementById("main").removeAttribute("aria-busy");
  arrive();
}

start();
