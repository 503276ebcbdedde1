//! Runs the code blocks of documents on a cluster, in a directory of their own.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;

use anyhow::{Context as _, ensure};
use tempfile::TempDir;
use tulle_bench::load::stats::Report;
use tulle_tests::charts::chart_path;
use tulle_tests::cluster::Cluster;
use tulle_tests::{commands, programs};

use super::pages::{self, Block, Id};
use super::replaced::REPLACEMENTS;

/// Waits until the Deployments of the application are rolled out.
pub(super) const ROLLED_OUT: &str = "kubectl rollout status deployment -n shop --timeout=5m";

/// Runs code blocks as a reader of the documents would, with one cluster and one working directory.
pub(super) struct Guide {
    pub(super) cluster: Cluster,
    files: TempDir,
    /// Values for the replacements, by name.
    pub(super) values: BTreeMap<&'static str, String>,
    /// The blocks whose commands were run.
    run_blocks: BTreeSet<Id>,
    /// The replacements that were used, by index.
    used: BTreeSet<usize>,
}

impl Guide {
    pub(super) fn new(cluster: Cluster) -> Self {
        Self {
            cluster,
            files: tempfile::tempdir().unwrap(),
            values: [("charts", chart_path("").trim_end_matches('/').to_owned())].into(),
            run_blocks: BTreeSet::new(),
            used: BTreeSet::new(),
        }
    }

    /// The commands of a block, by its number below a heading.
    pub(super) fn commands(&mut self, page: &str, heading: &str, number: usize) -> String {
        let id = (page.to_owned(), heading.to_owned(), number);
        let found = pages::commands(page).into_iter().find(|(found, _)| *found == id);
        let (_, text) = found.unwrap_or_else(|| panic!("{page} has no block {number} below {heading:?}"));
        self.run_blocks.insert(id);
        self.replace(page, text)
    }

    /// The YAML of a block, by its number below a heading.
    pub(super) fn yaml(&mut self, page: &str, heading: &str, number: usize) -> String {
        let below = |block: &Block| block.language == "yaml" && block.heading == heading;
        let found = pages::read(page).into_iter().filter(below).nth(number);
        let block = found.unwrap_or_else(|| panic!("{page} has no YAML {number} below {heading:?}"));
        self.replace(page, block.text)
    }

    fn replace(&mut self, page: &str, mut text: String) -> String {
        for (index, replacement) in REPLACEMENTS.iter().enumerate() {
            if !page.starts_with(replacement.pages) || !text.contains(replacement.from) {
                continue;
            }
            let mut to = replacement.to.to_owned();
            for (name, value) in &self.values {
                to = to.replace(&format!("@{name}"), value);
            }
            assert!(!to.contains('@'), "no value for {to}");
            text = text.replace(replacement.from, &to);
            self.used.insert(index);
        }
        text
    }

    /// Runs the commands of a block and returns their standard output.
    pub(super) async fn run(&mut self, page: &str, heading: &str, number: usize) -> String {
        let commands = self.commands(page, heading, number);
        let begun = tokio::time::Instant::now();
        let output = self.bash(&commands).await.unwrap();
        eprintln!("{:6.1?} {page}, {heading}, block {number}", begun.elapsed());
        output
    }

    /// Runs commands as a reader does, on the first node.
    pub(super) async fn bash(&self, commands: &str) -> anyhow::Result<String> {
        let mut bash = self.cluster.command("setpriv")?;
        let path = std::env::var_os("PATH").unwrap_or_default();
        let tools = ["helm", "kubectl"].map(|tool| programs::find(tool).map(|path| path.parent().unwrap().to_owned()));
        let dirs = [Ok(programs::static_binaries_dir()?)].into_iter().chain(tools);
        let dirs: Vec<_> = dirs.collect::<anyhow::Result<_>>()?;
        bash.args(["--pdeathsig=KILL", "bash"])
            .current_dir(self.files.path())
            .env("HOME", self.files.path())
            .env(
                "PATH",
                std::env::join_paths(dirs.into_iter().chain(std::env::split_paths(&path)))?,
            );
        commands::run_script(bash, commands).await
    }

    /// Runs commands again until they succeed and their output contains a text. Returns the output.
    pub(super) async fn run_until_output_contains(&self, commands: &str, text: &str) -> String {
        self.run_until(commands, text, |output| output.contains(text)).await
    }

    /// Runs commands again until they succeed and each line of their output contains a text.
    pub(super) async fn run_until_each_line_contains(&self, commands: &str, text: &str) {
        let contains = |output: &str| !output.is_empty() && output.lines().all(|line| line.contains(text));
        self.run_until(commands, text, contains).await;
    }

    async fn run_until(&self, commands: &str, text: &str, is_reached: impl Fn(&str) -> bool) -> String {
        let mut last = String::new();
        let begun = tokio::time::Instant::now();
        let shown = async || {
            last = self.bash(commands).await?;
            ensure!(is_reached(&last), "no {text:?} in the output of\n{commands}\n{last}");
            Ok(())
        };
        self.cluster.wait_until(text, shown).await.unwrap();
        eprintln!("{:6.1?} until {text:?}: {}", begun.elapsed(), commands.trim());
        last
    }

    pub(super) fn write(&self, name: &str, text: &str) {
        fs::write(self.files.path().join(name), text).unwrap();
    }

    pub(super) fn read(&self, name: &str) -> String {
        fs::read_to_string(self.files.path().join(name)).unwrap()
    }

    pub(super) async fn apply(&self, yaml: &str) {
        self.write("applied.yaml", yaml);
        let apply = async || self.bash("kubectl apply -f - <applied.yaml").await.map(drop);
        self.cluster
            .wait_until("the API server accepts the YAML", apply)
            .await
            .unwrap();
    }

    /// Waits until a request from a container is answered with this status, and the response contains a text.
    pub(super) async fn wait_for_response(&self, from: &str, url: &str, status: u16, text: &str) {
        let (namespace, client) = from.split_once('/').unwrap();
        let curl = format!("kubectl exec -n {namespace} deploy/{client} -c {client} -- curl -si -m 5 {url}");
        let answered = async || {
            let answer = self.bash(&curl).await?;
            let expected = format!("HTTP/1.1 {status} ");
            ensure!(
                answer.starts_with(&expected) && answer.contains(text),
                "{from} {url}: {answer}"
            );
            Ok(())
        };
        let what = format!("{from} gets {status} {text} from {url}");
        self.cluster.wait_until(&what, answered).await.unwrap();
    }

    /// Waits until the load of `steady/load` succeeds, and returns the number of its reports so far.
    pub(super) async fn begin_load(&self) -> usize {
        let mut n_reports_before = 0;
        let succeeds = async || {
            let reports = self.reports().await?;
            n_reports_before = reports.len();
            let last = reports.last().context("no report")?;
            ensure!(last.failed == 0 && last.requests > 0, "{last:?}");
            Ok(())
        };
        self.cluster.wait_until("the load succeeds", succeeds).await.unwrap();
        n_reports_before
    }

    /// Asserts that requests of the load were sent after its first `n_reports_before` reports, and none failed.
    pub(super) async fn assert_no_failure_since(&self, n_reports_before: usize, what: &str) {
        let reports = self.reports().await.unwrap().split_off(n_reports_before);
        let requests: u64 = reports.iter().map(|report| report.requests).sum();
        let failed: Vec<_> = reports.iter().filter(|report| report.failed > 0).collect();
        assert!(
            requests > 0 && failed.is_empty(),
            "{what}: of {requests} requests: {failed:?}"
        );
        eprintln!("{what}: {requests} requests, none failed");
    }

    async fn reports(&self) -> anyhow::Result<Vec<Report>> {
        let logs = self
            .cluster
            .kubectl(&["logs", "-n", "steady", "deploy/load", "-c", "load"])
            .await?;
        let reports = logs
            .lines()
            .filter(|line| line.starts_with('{'))
            .map(serde_json::from_str);
        reports.collect::<Result<_, _>>().context("a report")
    }

    /// Asserts that exactly the planned blocks were run, with every replacement.
    pub(super) fn assert_complete(&self, planned: &BTreeSet<Id>) {
        let missing: Vec<_> = planned.difference(&self.run_blocks).collect();
        let unplanned: Vec<_> = self.run_blocks.difference(planned).collect();
        assert!(
            missing.is_empty() && unplanned.is_empty(),
            "not run: {missing:?}\nnot in PLAN: {unplanned:?}"
        );
        let unused = REPLACEMENTS
            .iter()
            .enumerate()
            .filter(|(index, _)| !self.used.contains(index));
        let unused: Vec<_> = unused.map(|(_, replacement)| replacement.from).collect();
        assert!(unused.is_empty(), "not in any block: {unused:?}");
    }
}
