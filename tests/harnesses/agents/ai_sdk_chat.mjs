// /// script
// [tool.harness]
// npm = ["ai@7.0.173", "@ai-sdk/openai-compatible@3.0.92", "zod@4.6.7"]
// dialect = "chat"
// ///
import { createOpenAICompatible } from '@ai-sdk/openai-compatible'
import { stepCountIs, streamText, tool } from 'ai'
import { z } from 'zod'

const look = tool({
  description: 'Look somewhere.',
  inputSchema: z.object({ where: z.string(), times: z.number().default(1) }),
  execute: async ({ where, times }) => `${where}: nothing, ${times} times`
})
const model = createOpenAICompatible({ name: 'router', baseURL: process.env.OPENAI_BASE_URL })(process.env.MODEL)
const messages = []
let answer
for (const question of process.argv.slice(2)) {
  messages.push({ role: 'user', content: question })
  const result = streamText({ model, system: 'You look.', messages, tools: { look }, stopWhen: stepCountIs(20) })
  answer = await result.text
  messages.push(...(await result.responseMessages))
}
console.log(answer)
