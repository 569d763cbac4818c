# /// script
# [tool.harness]
# npm = ["@anthropic-ai/claude-code@2.1.332"]
# dialect = "messages"
# tool = "Bash"
# first = {command = "echo there 2", description = "Looks"}
# second = {command = "echo here", description = "Looks"}
# ///
export IS_SANDBOX=1 DISABLE_AUTOUPDATER=1 CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1 CLAUDE_CODE_MAX_OUTPUT_TOKENS=4000
more=
for question in "$@"; do
  answer=$(claude -p "$question" $more --model "$MODEL" --dangerously-skip-permissions --max-turns 20) || exit
  more=--continue
done
echo "$answer"
