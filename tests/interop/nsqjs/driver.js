// nsqjs behind the line protocol (see ../README.md). NODE_PATH names the folder that nsqjs was installed into.
'use strict'

const readline = require('readline')
const { Reader, Writer } = require('nsqjs')

const [host, port] = process.argv[2].split(':')

function writeEvent (event, fields) {
  process.stdout.write(JSON.stringify({ event, ...fields }) + '\n')
}

function reportError (error) {
  writeEvent('error', { text: `nsqjs: ${error}` })
}

const deliveries = new Map()
let lastDelivery = 0

function deliver (channel, message) {
  lastDelivery += 1
  deliveries.set(lastDelivery, message)
  writeEvent('message', {
    delivery: lastDelivery,
    channel,
    id: String(message.id),
    timestamp: String(message.timestamp),
    attempts: message.attempts,
    body: message.body.toString('base64')
  })
}

function take (delivery) {
  const message = deliveries.get(delivery)
  deliveries.delete(delivery)
  return message
}

let writer = null

function readyWriter () {
  if (writer === null) {
    writer = new Promise((resolve, reject) => {
      const connecting = new Writer(host, Number(port))
      connecting.on(Writer.ERROR, reportError)
      connecting.on(Writer.CLOSED, () => reject(new Error('the writer was closed')))
      connecting.on(Writer.READY, () => resolve(connecting))
      connecting.connect()
    })
  }
  return writer
}

async function publish (method, ...args) {
  const ready = await readyWriter()
  await new Promise((resolve, reject) => {
    ready[method](...args, error => error ? reject(error) : resolve())
  })
}

const commands = {
  pub: ({ topic, body }) => publish('publish', topic, Buffer.from(body, 'base64')),

  mpub: ({ topic, bodies }) => publish('publish', topic, bodies.map(body => Buffer.from(body, 'base64'))),

  // deferPublish documents a single message and works only with a list of one.
  dpub: ({ topic, body, delay_ms: delay }) => publish('deferPublish', topic, [Buffer.from(body, 'base64')], delay),

  subscribe: ({ topic, channel, max_in_flight: maxInFlight, msg_timeout_ms: messageTimeout }) => {
    const reader = new Reader(topic, channel, { nsqdTCPAddresses: [`${host}:${port}`], maxInFlight, messageTimeout })
    reader.on(Reader.MESSAGE, message => deliver(channel, message))
    reader.on(Reader.ERROR, reportError)
    reader.on(Reader.NSQD_CLOSED, () => reportError('the consumer\'s connection was lost'))
    reader.connect()
  },

  fin: ({ delivery }) => take(delivery).finish(),

  req: ({ delivery, delay_ms: delay }) => take(delivery).requeue(delay, false),

  touch: ({ delivery }) => deliveries.get(delivery).touch()
}

async function main () {
  writeEvent('hello', { lacks: [] })
  for await (const line of readline.createInterface({ input: process.stdin })) {
    const { command, do: name, ...args } = JSON.parse(line)
    try {
      await commands[name](args)
      writeEvent('done', { command })
    } catch (error) {
      writeEvent('failed', { command, error: String(error) })
    }
  }
  process.exit(0)
}

main()
