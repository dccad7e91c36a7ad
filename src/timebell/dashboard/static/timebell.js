// The whole of Timebell's own script: theme, zone, keyboard, clocks. Everything else is HTML.
(() => {
  const root = document.documentElement;
  const one = (selector) => document.querySelector(selector);
  const all = (selector) => [...document.querySelectorAll(selector)];
  const kept = localStorage.getItem("timebell-theme");
  if (kept) root.dataset.theme = kept;

  // The server writes times; it has to know the zone of this browser.
  const zone = Intl.DateTimeFormat().resolvedOptions().timeZone;
  if (zone) document.cookie = `timebell-timezone=${zone}; path=/ui; max-age=31536000; samesite=lax`;

  const open = (dialog) => { if (dialog && !dialog.open) dialog.showModal(); };
  const palette = () => { open(one("#palette")); one("#palette input")?.focus(); };
  document.addEventListener("click", (event) => {
    const asked = event.target.closest("[data-act]");
    if (!asked) return;
    if (asked.dataset.act === "theme") {
      const dark = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
      root.dataset.theme = (root.dataset.theme || dark) === "dark" ? "light" : "dark";
      localStorage.setItem("timebell-theme", root.dataset.theme);
    }
    if (asked.dataset.act === "palette" && window.htmx) { event.preventDefault(); palette(); }
    if (asked.dataset.act === "keys") open(one("#keys"));
    if (asked.dataset.act === "copy") navigator.clipboard?.writeText(asked.dataset.text);
  });
  document.addEventListener("change", (event) => {
    if (event.target.matches("[data-all]")) all('input[form="several"]').forEach((tick) => { tick.checked = event.target.checked; });
  });
  // What destroys asks first; without a script the page that follows does.
  document.addEventListener("submit", (event) => {
    const text = event.submitter?.dataset.confirm ?? event.target.dataset.confirm;
    if (text && !window.confirm(text)) event.preventDefault();
  });

  let went = 0;
  const go = { o: "/ui/", s: "/ui/schedules", j: "/ui/jobs", d: "/ui/dead-letters", c: "/ui/campaigns", t: "/ui/triggers", f: "/ui/forecast", a: "/ui/audit", n: "/ui/nodes" };
  document.addEventListener("keydown", (event) => {
    if ((event.metaKey || event.ctrlKey) && event.key === "k" && window.htmx) { event.preventDefault(); palette(); return; }
    if (event.target.matches("input:not([type=checkbox]),textarea,select")) { if (event.key === "Escape") event.target.blur(); return; }
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    if (Date.now() - went < 900 && go[event.key]) { location.href = go[event.key]; return; }
    if (event.key === "?") open(one("#keys"));
    if (event.key === "g") went = Date.now();
    if (event.key === "n") one("[data-new]")?.click();
    if (event.key === "/") {
      const filter = one("[data-search]");
      if (filter) { event.preventDefault(); filter.focus(); filter.select(); }
    }
    if (event.key === "j" || event.key === "k") {
      const rows = all("[data-row] a.main");
      const next = rows.indexOf(document.activeElement) + (event.key === "j" ? 1 : -1);
      rows[Math.max(0, Math.min(rows.length - 1, next))]?.focus();
    }
  });

  const distance = (seconds) => {
    const far = Math.abs(seconds);
    const said = far < 90 ? `${Math.round(far)} s` : far < 5400 ? `${Math.round(far / 60)} min`
      : far < 172800 ? `${Math.round(far / 3600)} h` : `${Math.round(far / 86400)} d`;
    return seconds >= 0 ? `in ${said}` : `${said} ago`;
  };
  const tick = () => all("time[data-rel]").forEach((time) => {
    time.textContent = distance((new Date(time.dateTime) - Date.now()) / 1000);
  });
  setInterval(tick, 1000);
  tick();
  document.addEventListener("htmx:after:swap", tick);

  // Who types before htmx listens is heard a little later.
  window.addEventListener("load", () => setTimeout(() => all("form.filters [data-search]").forEach((filter) => {
    if (filter.value !== filter.defaultValue) filter.dispatchEvent(new Event("input", { bubbles: true }));
  }), 300));

  // Whether what is on the screen is of now.
  let last = new Date();
  const badge = (lost) => {
    const shown = one("[data-live]");
    if (!shown) return;
    shown.hidden = false;
    shown.className = `live st ${lost ? "retry" : "ok"}`;
    shown.lastElementChild.textContent = lost ? `Reconnecting, data from ${last.toLocaleTimeString([], { timeZoneName: "short" })}` : "Live";
  };
  document.addEventListener("htmx:sse:after:connection", () => { last = new Date(); badge(false); });
  document.addEventListener("htmx:sse:after:message", () => { last = new Date(); badge(false); });
  document.addEventListener("htmx:sse:error", () => badge(true));
  document.addEventListener("htmx:sse:close", () => badge(true));
  // A page that asks again and again is live too. What was shown stays when the server does not answer.
  const answered = (status) => {
    if (status >= 500 || status === 429) { badge(true); return; }
    last = new Date();
    const asks = one("[hx-trigger^='every']");
    if (asks) badge(false);
    else if (!one("[hx-sse\\:connect]")) one("[data-live]")?.toggleAttribute("hidden", true);
  };
  document.addEventListener("htmx:after:request", (event) => answered(event.detail.ctx?.response?.status ?? 200));
  document.addEventListener("htmx:error", (event) => { if (event.detail.ctx?.request) badge(true); });
})();
