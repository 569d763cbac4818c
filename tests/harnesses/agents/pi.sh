# /// script
# [tool.harness]
# npm = ["@mariozechner/pi-coding-agent@0.73.1"]
# dialect = "chat"
# tool = "bash"
# first = {command = "echo there 2"}
# second = {command = "echo here"}
# ///
mkdir -p "$HOME/.pi/agent"
cat >"$HOME/.pi/agent/models.json" <<END
{"providers": {"router": {"baseUrl": "$OPENAI_BASE_URL", "apiKey": "none", "api": "openai-completions",
 "models": [{"id": "$MODEL", "name": "m", "reasoning": true, "input": ["text"], "contextWindow": 30000, "maxTokens": 2000,
 "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0}}]}}}
END
more=
for question in "$@"; do
  answer=$(pi -p "$question" $more --provider router --model "$MODEL") || exit
  more=--continue
done
echo "$answer"
