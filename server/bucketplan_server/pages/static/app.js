// Everything works without this: it copies signatures, confirms what was copied, and fills in what was typed again.
"use strict";
for (const button of document.querySelectorAll("button[data-copy]")) {
  button.hidden = !navigator.clipboard;
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(button.dataset.copy);
    button.textContent = "Copied";
  });
}

// A form that an ended session did not let through: this tab keeps it over the sign-in, and no longer.
const KEPT = "bucketplan-unsent";
const kept = JSON.parse(sessionStorage.getItem(KEPT) ?? "null");
const forms = [...document.querySelectorAll("form[data-keep]")];
if (kept && document.querySelector("[data-unsent]")) {
  sessionStorage.setItem(KEPT, JSON.stringify({ ...kept, refused: true }));
} else {
  sessionStorage.removeItem(KEPT);
  for (const form of kept?.refused ? forms : []) {
    if (form.getAttribute("action") !== kept.action || form.dataset.keep !== kept.form) continue;
    for (const [name, value] of kept.fields) {
      const field = form.elements.namedItem(name);
      if (field && field.type !== "hidden") field.value = value;
    }
    form.scrollIntoView();
  }
}
for (const form of forms) {
  form.addEventListener("submit", () => {
    const fields = [...new FormData(form)];
    const content = { action: form.getAttribute("action"), form: form.dataset.keep, fields };
    sessionStorage.setItem(KEPT, JSON.stringify(content));
  });
}
