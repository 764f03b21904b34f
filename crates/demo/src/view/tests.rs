use ratatui::Terminal;
use ratatui::backend::TestBackend;

use super::*;

fn card(model: &str, gib: u64, pods: &[(&str, u64)]) -> CardPicture {
    let pods = pods.iter().map(|(pod, gib)| ((*pod).to_owned(), gib << 10));
    CardPicture {
        uuid: String::new(),
        model: model.to_owned(),
        total_mib: gib << 10,
        pods: pods.collect(),
    }
}

fn scene() -> Scene {
    let nodes = vec![
        NodePicture {
            name: "node-0".to_owned(),
            cards: vec![
                card("H100 80 GiB", 80, &[("llm-000", 40), ("chat-001", 20)]),
                card("H100 80 GiB", 80, &[("batch-002", 80)]),
            ],
        },
        NodePicture {
            name: "node-1".to_owned(),
            cards: vec![
                card("L40S 48 GiB", 48, &[("embed-003", 3)]),
                card("T4 16 GiB", 16, &[]),
            ],
        },
    ];
    Scene {
        now: Duration::from_secs(3 * 3600 + 25 * 60),
        picture: Picture {
            nodes,
            waiting: vec!["llm-004".to_owned(), "train-005".to_owned()],
            running: 4,
            lost: 0,
        },
        rows: vec![
            Row {
                way: "gpustow tight".to_owned(),
                running: 4,
                waiting: 2,
                allocated: 0.638,
                ..Row::default()
            },
            Row::default(),
        ],
        look: "kubectl gpustow ui".to_owned(),
    }
}

/// What is on a screen of that size.
fn screen(width: u16, height: u16) -> String {
    drawn(&scene(), width, height)
}

fn drawn(scene: &Scene, width: u16, height: u16) -> String {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal.draw(|frame| draw(frame, scene)).unwrap();
    let buffer = terminal.backend().buffer();
    let rows = buffer.content().chunks(width.max(1).into());
    let rows = rows.map(|row| row.iter().map(|cell| cell.symbol()).collect::<String>());
    rows.map(|row| row.trim_end().to_owned() + "\n").collect()
}

#[test]
fn every_card_is_a_bar_of_pods() {
    let expected = "\
gpustow tight  03:25 of 12:00 h  63.8 % allocated                         4 running, 2 waiting, 0 finished
q: stop and sum up; in a browser: kubectl gpustow ui
node-0  2 × H100 80 GiB                               node-1  1 × L40S 48 GiB, 1 × T4 16 GiB
 0 [aaaaaaaaaaaaaaaaaaaabbbbbbbbbb..........]  75 %    0 [ddd.....................................]   6 %
 1 [cccccccccccccccccccccccccccccccccccccccc] 100 %    1 [........................................]   0 %

waiting: llm-004 train-005
";
    let shown = screen(106, 10);
    assert!(shown.starts_with(expected), "{shown}");
}

/// As many as six nodes of the demo have, and a long command.
fn full() -> Scene {
    let mut full = scene();
    let models = [
        ("H100 80 GiB", 80, 8),
        ("L4 24 GiB", 24, 4),
        ("L40S 48 GiB", 48, 2),
        ("T4 16 GiB", 16, 2),
    ];
    let kinds = models.iter().cycle().take(6).enumerate();
    let nodes = kinds.map(|(number, &(model, gib, count))| NodePicture {
        name: format!("node-{number}"),
        cards: (0..count)
            .map(|at| card(model, gib, &[(&format!("llm-{at:03}"), gib / 2)]))
            .collect(),
    });
    full.picture.nodes = nodes.collect();
    full.rows[0].running = 38;
    full.rows[0].tally.finished = 371;
    full.look =
        "kubectl gpustow --kubeconfig /tmp/gpustow-demo-Xa81Kf/tight.kubeconfig ui".to_owned();
    full
}

#[test]
fn on_80_by_24_all_cards_are_shown_and_nothing_is_cut() {
    let shown = drawn(&full(), 80, 24);
    assert!(!shown.contains("lines more"), "{shown}");
    assert_eq!(shown.matches(" 50 %").count(), 28, "{shown}");
    let lines: Vec<_> = shown.lines().collect();
    assert!(lines[0].ends_with("38 running, 2 waiting"), "{shown}");
    assert_eq!(lines[2], format!("  {}", full().look), "{shown}");
    assert!(shown.contains("mean wait  allocated\n"), "{shown}");
    let narrow = drawn(&full(), 70, 24);
    assert!(narrow.contains("mean wait\n"), "{narrow}");
}

#[test]
fn a_small_terminal_shows_less() {
    let shown = screen(40, 10);
    assert!(shown.contains("lines more"), "{shown}");
    for (width, height) in [(0, 0), (1, 1), (3, 40), (10, 3), (40, 10), (300, 2)] {
        screen(width, height);
    }
}
