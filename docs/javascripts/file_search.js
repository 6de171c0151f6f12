// The search of pages that are opened from the file system. Browsers start no workers there, so the
// search's script runs in a hidden frame, behind the interface of a worker.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    #frame;
    #isReady;

    constructor(url) {
      super();
      this.#frame = document.createElement("iframe");
      this.#frame.hidden = true;
      document.body.append(this.#frame);
      const inside = this.#frame.contentWindow;
      inside.postMessage = (data) => this.#answer(data);
      inside.importScripts = async (...urls) => {
        for (const one of urls) await this.#load(one);
      };
      inside.__index = window.__index;
      this.#isReady = this.#load(url);
    }

    #load(url) {
      return new Promise((resolve, reject) => {
        const script = this.#frame.contentDocument.createElement("script");
        Object.assign(script, { src: url, onload: resolve, onerror: reject });
        this.#frame.contentDocument.body.append(script);
      });
    }

    #answer(data) {
      const event = new MessageEvent("message", { data });
      this.onmessage?.(event);
      this.dispatchEvent(event);
    }

    async postMessage(data) {
      await this.#isReady;
      this.#frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }));
    }
  };
  window.Worker = window.IFrameWorker;
}
