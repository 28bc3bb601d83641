from dosapp.cli import main

main()
