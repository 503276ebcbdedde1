//! Compares complete renderings byte by byte with the files in `golden/`.
//!
//! To accept changes: `TULLE_BLESS=1 ./run with cargo nextest run -p tulle-tests --test charts golden`.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::PathBuf;
use std::{env, fs};

use tulle_tests::charts::Helm;

use crate::render::installations;

#[test]
fn golden_renderings_are_as_recorded() {
    let helm = Helm::new().unwrap();
    let installations: BTreeMap<_, _> = installations().into_iter().collect();
    let mut report = String::new();
    for (file, installation) in GOLDEN {
        let values: Vec<&str> = installations[installation].iter().map(String::as_str).collect();
        let rendered = helm.template("tulle-control-plane", &values).unwrap();
        let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(format!("tests/charts/golden/{file}"));
        if env::var_os("TULLE_BLESS").is_some() {
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, &rendered).unwrap();
        }
        let recorded = fs::read_to_string(&path).unwrap_or_default();
        if recorded != rendered {
            let _ = write!(report, "\n{}\n{}", path.display(), differences(&recorded, &rendered));
        }
    }
    assert!(
        report.is_empty(),
        "{report}\nwhere this is meant: TULLE_BLESS=1 ./run with cargo nextest run -p tulle-tests --test charts golden"
    );
}

/// Added, removed and changed objects, with the first difference of each.
fn differences(recorded: &str, rendered: &str) -> String {
    let (was, is) = (documents(recorded), documents(rendered));
    let mut differing = String::new();
    for name in was.keys().filter(|name| !is.contains_key(*name)) {
        let _ = writeln!(differing, "  {name} is gone");
    }
    for (name, &text) in &is {
        let Some(&before) = was.get(name) else {
            let _ = writeln!(differing, "  {name} is new");
            continue;
        };
        let count = before.lines().count().max(text.lines().count());
        let line = |text: &str, at: usize| text.lines().nth(at).unwrap_or("(its end)").to_owned();
        if let Some(at) = (0..count).find(|at| line(before, *at) != line(text, *at)) {
            let (before, now) = (line(before, at), line(text, at));
            let _ = writeln!(differing, "  {name}, line {}:\n    - {before}\n    + {now}", at + 1);
        }
    }
    match differing.as_str() {
        "" => "  the order of its objects is another\n".to_owned(),
        _ => differing,
    }
}

/// The objects of a rendering by kind and name.
fn documents(rendered: &str) -> BTreeMap<String, &str> {
    let mut documents = BTreeMap::new();
    for text in rendered.split("---\n").filter(|text| !text.trim().is_empty()) {
        let field = |key: &str| text.lines().find_map(|line| line.strip_prefix(key)).unwrap_or("?");
        documents.insert(format!("{} {}", field("kind: "), field("  name: ")), text);
    }
    documents
}

/// Golden files, with the installation that each renders.
const GOLDEN: [(&str, &str); 3] = [
    ("default.yaml", "default"),
    ("highly-available.yaml", "highly available"),
    ("everything-optional.yaml", "everything optional"),
];

#[test]
fn golden_differences_name_the_object_and_the_line() {
    let object =
        |kind: &str, replicas: u8| format!("---\n# Source: a\nkind: {kind}\nmetadata:\n  name: a\nn: {replicas}\n");
    let was = [object("Deployment", 1), object("Service", 1), object("Role", 1)].concat();
    let is = [object("Deployment", 2), object("Secret", 1), object("Role", 1)].concat();
    let expected = "  Service a is gone\n  Deployment a, line 5:\n    - n: 1\n    + n: 2\n  Secret a is new\n";
    assert_eq!(differences(&was, &is), expected);
    let turned = [object("Role", 1), object("Deployment", 1), object("Service", 1)].concat();
    assert_eq!(differences(&was, &turned), "  the order of its objects is another\n");
}
