# /// script
# [tool.harness]
# of = "pi"
# scene = "compaction"
# beside = "context summarization"
# first = {command = "seq 2000"}
# ///
mkdir -p "$HOME/.pi/agent"
cat >"$HOME/.pi/agent/models.json" <<END
{"providers": {"router": {"baseUrl": "$OPENAI_BASE_URL", "apiKey": "none", "api": "openai-completions",
 "models": [{"id": "$MODEL", "name": "m", "reasoning": true, "input": ["text"], "contextWindow": 9000, "maxTokens": 2000,
 "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0}}]}}}
END
echo '{"compaction": {"reserveTokens": 2000, "keepRecentTokens": 10}}' >"$HOME/.pi/agent/settings.json"
pi -p "$1" --provider router --model "$MODEL" >first.txt || exit
pi -p "$2" --continue --provider router --model "$MODEL"
