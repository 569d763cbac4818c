# /// script
# [tool.harness]
# npm = ["@google/gemini-cli@0.61.0"]
# dialect = "gemini"
# match = "calls"
# trajectories = 2
# because = "a resume strips texts of the white space around them: [doubled-results](../findings/doubled-results.sh)"
# tool = "run_shell_command"
# first = {command = "echo there 2", description = "Looks"}
# second = {command = "echo here", description = "Looks"}
# ///
mkdir -p "$HOME/.gemini"
# With an address in its environment it takes another kind of key for meant, which its own check refuses. Skills stand in its
# prompt in another order each time.
cat >"$HOME/.gemini/settings.json" <<END
{"security": {"auth": {"selectedType": "gemini-api-key"}}, "privacy": {"usageStatisticsEnabled": false}, "skills": {"enabled": false}}
END
more=
for question in "$@"; do
  answer=$(gemini -p "$question" $more -m "$MODEL" --yolo --skip-trust) || exit
  more="--resume latest"
done
echo "$answer"
