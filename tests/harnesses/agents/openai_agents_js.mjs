// /// script
// [tool.harness]
// npm = ["@openai/agents@0.20.0", "zod@4.6.7"]
// dialect = "responses"
// unknown = false
// ///
import { Agent, run, setTracingDisabled, tool } from '@openai/agents'
import { z } from 'zod'

setTracingDisabled(true)
const look = tool({
  name: 'look',
  description: 'Look somewhere.',
  parameters: z.object({ where: z.string(), times: z.number() }),
  execute: async ({ where, times }) => `${where}: nothing, ${times} times`
})
const agent = new Agent({ name: 'one', instructions: 'You look.', model: process.env.MODEL, tools: [look] })
let history = []
let answer
for (const question of process.argv.slice(2)) {
  const result = await run(agent, [...history, { role: 'user', content: question }])
  history = result.history
  answer = result.finalOutput
}
console.log(answer)
