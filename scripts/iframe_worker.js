// The search of the site runs in a worker. Browsers start none for a page that is opened as a file: there, a frame runs
// its script. mkdocs-material loads a script like this one from another server, which a site without a network cannot.
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    #frame = document.createElement("iframe")
    #ready

    constructor(url) {
      super()
      this.#frame.hidden = true
      document.documentElement.append(this.#frame)
      const inside = this.#frame.contentWindow
      const load = (src) =>
        new Promise((loaded, failed) => {
          const script = inside.document.createElement("script")
          script.onload = loaded
          script.onerror = failed
          script.src = new URL(src, document.baseURI)
          inside.document.head.append(script)
        })
      inside.importScripts = (...urls) => urls.reduce((before, src) => before.then(() => load(src)), Promise.resolve())
      inside.postMessage = (data) => {
        const event = new MessageEvent("message", { data })
        this.dispatchEvent(event)
        this.onmessage?.(event)
      }
      inside.__index = window.__index
      this.#ready = load(url)
    }

    postMessage(data) {
      this.#ready.then(() => {
        const inside = this.#frame.contentWindow
        inside.dispatchEvent(new inside.MessageEvent("message", { data }))
      })
    }

    terminate() {
      this.#frame.remove()
    }
  }
