//! The pages of `docs/how-to` and `docs/tutorials`: their code blocks, and which test runs the commands.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use tulle_tests::charts::chart_path;

/// A code block of a page.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct Block {
    pub(super) heading: String,
    /// `console`, `sh`, `yaml`, ...
    pub(super) language: String,
    /// Without the indentation of the fence.
    pub(super) text: String,
}

impl Block {
    pub(super) fn has_commands(&self) -> bool {
        ["console", "sh"].contains(&self.language.as_str())
    }
}

/// What happens to the blocks with commands below a heading.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Run {
    /// All are run on the cluster of this module.
    OnCluster,
    /// All are run in network namespaces by this module.
    OnHosts,
    /// Another test runs them.
    ByOtherTest(&'static str),
    /// The reason why no test runs them.
    ByNoTest(&'static str),
}

/// Reads a page, such as `how-to/install.md`.
pub(super) fn read(page: &str) -> Vec<Block> {
    parse(&fs::read_to_string(docs().join(page)).unwrap_or_else(|error| panic!("{page}: {error}")))
}

/// Identifies a block with commands: page, heading, and its number among those below this heading.
pub(super) type Id = (String, String, usize);

/// The blocks with commands of a page.
pub(super) fn commands(page: &str) -> Vec<(Id, String)> {
    let mut found: Vec<(Id, String)> = Vec::new();
    for block in read(page).into_iter().filter(Block::has_commands) {
        let earlier = found.iter().filter(|((_, heading, _), _)| *heading == block.heading);
        let number = earlier.count();
        found.push(((page.to_owned(), block.heading, number), block.text));
    }
    found
}

/// The blocks that a test of this module has to run.
pub(super) fn planned(run: Run) -> BTreeSet<Id> {
    let rows = PLAN.iter().flat_map(|(page, heading, planned)| {
        let below = move |((_, found, _), _): &(Id, String)| found == heading;
        let blocks = commands(page).into_iter().filter(below).map(|(id, _)| id);
        blocks.filter(move |_| *planned == run)
    });
    rows.collect()
}

fn parse(page: &str) -> Vec<Block> {
    let mut blocks = Vec::new();
    let mut heading = String::new();
    let mut lines = page.lines();
    while let Some(line) = lines.next() {
        let fence = line.trim_start();
        if let Some(text) = line.strip_prefix('#') {
            text.trim_start_matches('#').trim().clone_into(&mut heading);
        } else if let Some(language) = fence.strip_prefix("```") {
            let indent = line.len() - fence.len();
            let unindented = |line: &str| line.get(indent..).unwrap_or("").to_owned() + "\n";
            let text = lines.by_ref().take_while(|line| line.trim() != "```").map(unindented);
            blocks.push(Block {
                text: text.collect(),
                heading: heading.clone(),
                language: language.to_owned(),
            });
        }
    }
    blocks
}

fn docs() -> std::path::PathBuf {
    Path::new(&chart_path("..")).join("docs")
}

#[test]
fn blocks_are_found_by_heading_without_the_indentation_of_lists() {
    let page = "# A page\n\n## 1. Begin\n\n```console\na\n  b\n```\n\n1. Item.\n\n   ```yaml\n   # no heading\n   x: 1\n   ```\n";
    let block = |language: &str, text: &str| Block {
        heading: "1. Begin".to_owned(),
        language: language.to_owned(),
        text: text.to_owned(),
    };
    let expected = [block("console", "a\n  b\n"), block("yaml", "# no heading\nx: 1\n")];
    assert_eq!(parse(page), expected);
}

#[test]
fn every_command_of_the_pages_is_run_by_a_test_or_listed_with_a_reason() {
    let mut wrong = Vec::new();
    let mut headings = BTreeSet::new();
    for dir in ["how-to", "tutorials"] {
        for file in fs::read_dir(docs().join(dir)).unwrap() {
            let page = format!("{dir}/{}", file.unwrap().file_name().to_str().unwrap());
            let found = commands(&page);
            headings.extend(found.into_iter().map(|((page, heading, _), _)| (page, heading)));
        }
    }
    for (page, heading) in &headings {
        let rows = PLAN.iter().filter(|row| row.0 == page && row.1 == heading);
        if rows.count() != 1 {
            wrong.push(format!("{page}, {heading:?} has commands; expected one row in PLAN"));
        }
    }
    for (page, heading, _) in PLAN {
        if !headings.contains(&((*page).to_owned(), (*heading).to_owned())) {
            wrong.push(format!(
                "{page} has no commands below {heading:?}; remove the row from PLAN"
            ));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

const BY_INSTALLATION: Run = Run::ByOtherTest("installation.rs");
const TWO_CLUSTERS: Run = Run::ByNoTest(
    "needs two clusters with pods; kubernetes/multicluster/commands.rs runs the commands with two API servers",
);
const JOINED_ANCHORS: Run = Run::ByNoTest(
    "needs two clusters with pods; cluster/multicluster/anchors.rs installs a bundle in two clusters by the same values, and \
     kubernetes/multicluster/commands.rs reads it by the same command",
);
const BY_VM: Run = Run::ByOtherTest("tests/clients/vm.rs, with the same files and commands");
const DATABASES_OF_READER: Run =
    Run::ByNoTest("needs databases of the reader; tests/tests/stateful sets the same annotations");
const BY_PUBLISH: Run =
    Run::ByNoTest("needs a published release; `./run publish --try` does the same with a local registry");

/// Every heading with commands.
const PLAN: &[(&str, &str, Run)] = &[
    ("how-to/install.md", "1. Check the cluster", Run::OnCluster),
    ("how-to/install.md", "2. Create trust anchor and issuer", Run::OnCluster),
    ("how-to/install.md", "3. Install the custom resources", Run::OnCluster),
    ("how-to/install.md", "5. Install the control plane", Run::OnCluster),
    ("how-to/install.md", "6. Check the control plane", Run::OnCluster),
    ("how-to/install.md", "7. Mesh a namespace", Run::OnCluster),
    ("how-to/install.md", "Undo", Run::OnCluster),
    ("how-to/policy.md", "1. Audit", Run::OnCluster),
    (
        "how-to/debug-a-request.md",
        "1. Read the cause of the response",
        Run::OnCluster,
    ),
    (
        "how-to/debug-a-request.md",
        "2. Find failures without the response",
        Run::OnCluster,
    ),
    (
        "how-to/debug-a-request.md",
        "3. Compare with the control plane",
        Run::OnCluster,
    ),
    ("how-to/debug-a-request.md", "4. Inspect the proxy", Run::OnCluster),
    ("how-to/debug-a-request.md", "5. Raise the log level", Run::OnCluster),
    ("how-to/monitoring.md", "1. Enable it", Run::OnCluster),
    ("how-to/monitoring.md", "Without the operator", Run::OnCluster),
    ("how-to/rotate-trust.md", "The issuer", Run::OnCluster),
    ("how-to/rotate-trust.md", "The trust anchor", Run::OnCluster),
    ("how-to/upgrade.md", "2. Check, and save the values", Run::OnCluster),
    ("how-to/upgrade.md", "3. Upgrade the custom resources", Run::OnCluster),
    ("how-to/upgrade.md", "4. Upgrade the control plane", Run::OnCluster),
    ("how-to/upgrade.md", "5. Upgrade the proxies", Run::OnCluster),
    ("how-to/upgrade.md", "Undo", Run::OnCluster),
    (
        "how-to/upgrade.md",
        "An installation by `tulle install`",
        Run::OnCluster,
    ),
    (
        "how-to/cert-manager.md",
        "1. Give cert-manager the trust anchor",
        Run::ByNoTest("needs cert-manager"),
    ),
    (
        "how-to/cert-manager.md",
        "2. Request the issuer",
        Run::ByNoTest("needs cert-manager"),
    ),
    (
        "how-to/cert-manager.md",
        "3. Create the ConfigMap of trust anchors",
        Run::OnCluster,
    ),
    ("how-to/cert-manager.md", "4. Install the control plane", Run::OnCluster),
    ("how-to/cert-manager.md", "Undo", Run::OnCluster),
    ("how-to/gitops.md", "1. Check what is rendered", Run::OnCluster),
    ("how-to/gitops.md", "Conflicts of server-side apply", Run::OnCluster),
    (
        "how-to/air-gapped.md",
        "1. Copy images and charts",
        Run::ByNoTest("needs two registries and a release build"),
    ),
    ("how-to/air-gapped.md", "2. Write your values", Run::OnCluster),
    ("how-to/air-gapped.md", "3. Install", Run::OnCluster),
    ("how-to/air-gapped.md", "4. Check the images", Run::OnCluster),
    ("how-to/replace-linkerd.md", "The proxies", Run::OnCluster),
    ("how-to/replace-linkerd.md", "The control plane", Run::OnCluster),
    ("how-to/explicit-proxy.md", "1. Let the proxy listen", Run::OnHosts),
    ("how-to/explicit-proxy.md", "2. Send requests through it", Run::OnHosts),
    ("how-to/explicit-proxy.md", "3. Check it", Run::OnHosts),
    ("how-to/verify-a-release.md", "1. Verify images and charts", BY_PUBLISH),
    (
        "how-to/verify-a-release.md",
        "2. Read the list of components",
        BY_PUBLISH,
    ),
    ("how-to/verify-a-release.md", "3. Verify files", BY_PUBLISH),
    (
        "how-to/verify-a-release.md",
        "4. Verify the provenance",
        Run::ByNoTest("needs a published release"),
    ),
    (
        "how-to/verify-a-release.md",
        "5. Install what you have verified",
        Run::ByNoTest("needs a published release"),
    ),
    (
        "how-to/databases-and-brokers.md",
        "1. Mesh the server and its clients",
        DATABASES_OF_READER,
    ),
    (
        "how-to/databases-and-brokers.md",
        "2. Refuse clients without an identity",
        DATABASES_OF_READER,
    ),
    ("how-to/databases-and-brokers.md", "Redis Cluster", DATABASES_OF_READER),
    (
        "how-to/databases-and-brokers.md",
        "Troubleshooting",
        DATABASES_OF_READER,
    ),
    ("how-to/databases-and-brokers.md", "Undo", DATABASES_OF_READER),
    ("how-to/virtual-machines.md", "1. Apply the manifests", BY_VM),
    ("how-to/virtual-machines.md", "2. Give the machine a certificate", BY_VM),
    ("how-to/virtual-machines.md", "3. Configure the proxy", BY_VM),
    (
        "how-to/virtual-machines.md",
        "4. Redirect traffic",
        Run::ByNoTest("needs systemd; vm.rs runs the units' commands"),
    ),
    ("how-to/multicluster.md", "Join the trust anchors", JOINED_ANCHORS),
    ("how-to/multicluster.md", "1. Install the extension", TWO_CLUSTERS),
    ("how-to/multicluster.md", "2. Link the clusters", TWO_CLUSTERS),
    ("how-to/multicluster.md", "3. Export a Service", TWO_CLUSTERS),
    (
        "how-to/multicluster.md",
        "Permit clients of the other cluster",
        Run::ByNoTest(
            "needs two clusters with pods; cluster/multicluster applies such a policy, and runs `tulle identity`",
        ),
    ),
    ("how-to/multicluster.md", "4. Check the link", TWO_CLUSTERS),
    ("how-to/multicluster.md", "Undo", TWO_CLUSTERS),
    (
        "tutorials/demo.md",
        "Your own manifests",
        Run::ByNoTest("placeholders for the files of the reader"),
    ),
    (
        "tutorials/demo.md",
        "Look inside",
        Run::ByNoTest("names of a running demo"),
    ),
    ("tutorials/first-cluster.md", "1. Certificates", BY_INSTALLATION),
    ("tutorials/first-cluster.md", "2. Install", BY_INSTALLATION),
    ("tutorials/first-cluster.md", "3. Mesh an application", BY_INSTALLATION),
    ("tutorials/first-cluster.md", "4. Look", BY_INSTALLATION),
    (
        "tutorials/first-cluster.md",
        "5. Control who may call whom",
        BY_INSTALLATION,
    ),
    ("tutorials/first-cluster.md", "6. Clean up", BY_INSTALLATION),
    ("tutorials/without-kubernetes.md", "1. Create three hosts", Run::OnHosts),
    ("tutorials/without-kubernetes.md", "2. Create credentials", Run::OnHosts),
    ("tutorials/without-kubernetes.md", "3. Describe the mesh", Run::OnHosts),
    (
        "tutorials/without-kubernetes.md",
        "4. Start the control plane",
        Run::OnHosts,
    ),
    ("tutorials/without-kubernetes.md", "5. Start the sidecars", Run::OnHosts),
    ("tutorials/without-kubernetes.md", "6. Send a request", Run::OnHosts),
    ("tutorials/without-kubernetes.md", "7. Add a policy", Run::OnHosts),
    ("tutorials/without-kubernetes.md", "8. Look at the mesh", Run::OnHosts),
    ("tutorials/without-kubernetes.md", "9. Clean up", Run::OnHosts),
];
