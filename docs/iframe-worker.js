// The search of the site from disk: browsers start no worker for a file, so its script runs in a hidden frame instead.
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inner = (this.inner = frame.contentWindow);
      const page = inner.document;
      page.open(); // Firefox would otherwise replace the page of the frame later
      page.write("<body></body>");
      page.close();
      inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = Object.assign(page.createElement("script"), { src: new URL(url, location.href).href });
      this.ready = new Promise((loaded) => script.addEventListener("load", loaded));
      page.body.append(script);
    }
    postMessage(data) {
      this.ready.then(() => this.inner.dispatchEvent(new this.inner.MessageEvent("message", { data })));
    }
  };
}
